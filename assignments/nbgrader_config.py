"""The nbgrader course of Work per Byte. Every option can be set on the command line: `--Execute.timeout=120`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # nbgrader reads this file from anywhere

from isolation import IsolatingExecute  # noqa: E402
from nbgrader.converters import Autograde  # noqa: E402
from nbgrader.preprocessors import Execute  # noqa: E402

c = get_config()  # noqa: F821

c.CourseDirectory.course_id = "work-per-byte"
c.CourseDirectory.root = str(HERE)

# An endless loop or a dead kernel costs the cell at which it happens, and what needs that cell.
steps = Autograde.class_traits()["autograde_preprocessors"].default()
c.Autograde.autograde_preprocessors = [IsolatingExecute if step is Execute else step for step in steps]
c.Execute.timeout = 60  # seconds for one cell; the tests of a set need a few
c.Execute.interrupt_on_timeout = True

c.OverwriteCells.add_missing_cells = True  # a student may have deleted a test
