"""Grading that goes on after a kernel has died, or has to be killed."""

from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat.v4 import new_output
from nbgrader.preprocessors import Execute
from traitlets import Integer


class IsolatingExecute(Execute):
    """Runs a submission. A cell at which the kernel dies gets an error, and the other cells run without it.

    nbgrader's own gives up on the whole submission when the kernel dies, or when a loop ignores the interrupt that
    follows the time limit. Here the next kernel takes its place: it runs again what came before, except for the tests
    (they have their result) and what broke a kernel, and goes on behind the broken cell.
    """

    max_output = Integer(200_000, help="Characters of one cell's output that are kept.").tag(config=True)

    def preprocess(self, nb, resources=None, km=None):
        """Returns: the notebook with its outputs, and the resources."""
        self.broken: set[int] = set()
        return super().preprocess(nb, resources, km)

    def preprocess_cell(self, cell, resources, index):
        """Returns: the cell with its outputs, and the resources."""
        self.try_cell(cell, index)
        while self.kc is None:  # as often as a cell that is run again breaks the new kernel too
            self.start_again(before=index)
        return cell, resources

    def try_cell(self, cell, index: int) -> None:
        """Run a cell; when it breaks the kernel, stop the kernel and leave an error as the cell's output."""
        self.n_output = 0
        try:
            self.execute_cell(cell, index)
        except (CellTimeoutError, DeadKernelError) as error:
            self.broken.add(index)
            died = isinstance(error, DeadKernelError)
            reason = "the kernel died at this cell" if died else "this cell did not stop, so its kernel was killed"
            cell.outputs = [new_output("error", ename=type(error).__name__, evalue=reason, traceback=[reason])]
            self.shutdown_kernel = "immediate"  # a kernel that ignored an interrupt would ignore a request too
            self._cleanup_kernel()  # sets km and kc to None

    def start_again(self, before: int) -> None:
        """Start a kernel, and run again what later cells may need: what precedes a cell, except for tests."""
        self.km = self.create_kernel_manager()
        self.start_new_kernel()
        self.start_new_kernel_client()
        for index, cell in enumerate(self.nb.cells[:before]):
            is_test = cell.metadata.get("nbgrader", {}).get("grade", False)
            if index not in self.broken and not is_test:
                self.try_cell(cell, index)
            if self.kc is None:
                return

    def output(self, outs, msg, display_id, cell_index):
        """Keep a cell's outputs up to a limit: a loop that prints would fill the memory. Returns: it, or None."""
        self.n_output += len(str(msg["content"].get("text", "")))
        if self.n_output > self.max_output:
            return None
        return super().output(outs, msg, display_id, cell_index)
