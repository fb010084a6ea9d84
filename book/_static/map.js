// Makes the map of techniques sortable by its headings and filterable by words and by column.
(() => {
  const CHOICES = ["Reduces", "Phase"]; // columns with a menu; a cell may hold several values, separated by commas

  const text = (row, column) => row.cells[column].textContent.trim();

  const enhance = (table) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const headings = [...table.tHead.rows[0].cells];
    const names = headings.map((cell) => cell.textContent.trim());
    const form = document.createElement("form");
    form.className = "technique-filters";
    form.setAttribute("role", "search");
    form.setAttribute("aria-label", "Techniques");
    form.addEventListener("submit", (event) => event.preventDefault());
    const count = document.createElement("output");

    const field = (name, control) => {
      const label = document.createElement("label");
      label.append(`${name} `, control);
      form.append(label);
      control.addEventListener("input", apply);
      return control;
    };
    const apply = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const content = row.textContent.toLowerCase();
        row.hidden = !(words.every((word) => content.includes(word)) && menus.every(({ column, menu }) =>
          !menu.value || text(row, column).split(/,\s*/).includes(menu.value)));
        shown += !row.hidden;
      }
      count.textContent = `${shown} of ${rows.length} shown`;
    };

    const search = field("Find", Object.assign(document.createElement("input"), { type: "search" }));
    const menus = CHOICES.map((name) => {
      const column = names.indexOf(name);
      const values = [...new Set(rows.flatMap((row) => text(row, column).split(/,\s*/)))].sort();
      const menu = document.createElement("select");
      menu.append(new Option("any", ""), ...values.map((value) => new Option(value, value)));
      return { column, menu: field(name, menu) };
    });
    form.append(count);

    headings.forEach((cell, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = names[column];
      cell.replaceChildren(button);
      cell.setAttribute("scope", "col");
      button.addEventListener("click", () => {
        const order = cell.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        cell.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        rows.sort((a, b) => sign * text(a, column).localeCompare(text(b, column), "en", { numeric: true }));
        body.append(...rows);
      });
    });
    (table.closest(".pst-scrollable-table-container") ?? table).before(form);
    apply();
  };

  const start = () => document.querySelectorAll("table.technique-map").forEach(enhance);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
