// Draws the explorers of a page with the book's own Vega, which is fetched only where there is one.
// The chart's text is `currentColor`, so the light and the dark mode need no second drawing.
(() => {
  const here = document.currentScript.src;

  const loadVega = () => new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("vega.bundle.js", here).href;
    script.onload = () => resolve(window.vegaEmbed);
    script.onerror = () => reject(new Error("vega.bundle.js could not be loaded"));
    document.head.append(script);
  });

  // Vega measures a chart's column when the window changes; the column also changes later (a scrollbar, a sidebar, a
  // box that unfolds), so a chart whose width is no longer the drawn one asks for the measure again.
  const fit = new ResizeObserver(() => window.dispatchEvent(new Event("resize")));

  const mount = async (figure, vegaEmbed) => {
    const spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    const chart = figure.querySelector(".gptlite-chart");
    figure.classList.add("is-live"); // before drawing: a hidden chart has no width to fill
    try {
      const result = await vegaEmbed(chart, spec, {
        actions: false,
        renderer: "svg",
        bind: figure.querySelector(".gptlite-controls"),
      });
      figure.view = result.view;
      fit.observe(chart);
    } catch (error) {
      figure.classList.remove("is-live");
      throw error;
    }
  };

  const mountAll = async () => {
    const figures = [...document.querySelectorAll("figure.gptlite-explorer")];
    if (!figures.length) return;
    const vegaEmbed = await loadVega();
    for (const figure of figures) await mount(figure, vegaEmbed);
  };

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", mountAll);
  else mountAll();
})();
