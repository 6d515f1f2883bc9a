"""Draws docs/session.svg: what a terminal shows of a real run of chat.py, with the default model.

python docs/session.py
"""

import sys
import tempfile
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "tests")]

from terminal import Terminal  # noqa: E402

TYPED = ("What is the capital of Japan?", "What is it famous for? One sentence.", "/cache")
COLUMNS, ROWS = 112, 27


def talk(state: Path) -> Terminal:
    """A conversation up to its last prompt."""
    terminal = Terminal(state, "--temp", 0, columns=COLUMNS, rows=ROWS)
    for text in TYPED:
        row = terminal.screen.cursor.y
        terminal.type(f"{text}\r")
        terminal.until(lambda row=row: terminal.screen.cursor.y > row)
        terminal.ready()
        terminal.see("tok/s │")  # the toolbar is drawn
    return terminal


def text_of(screen) -> Text:
    """The screen's characters with their colours."""
    text = Text()
    for row in range(screen.lines):
        cells = (screen.buffer[row][column] for column in range(screen.columns))
        for (colour, reverse), run in groupby(cells, lambda cell: (cell.fg, cell.reverse)):
            known = None if colour == "default" else colour.replace("bright", "bright_")
            text.append("".join(cell.data for cell in run), Style(color=known, reverse=reverse))
        text.append("\n")
    return text


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        terminal = talk(Path(folder))
        terminal.child.close(force=True)
    console = Console(record=True, width=COLUMNS, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text_of(terminal.screen), end="")
    console.save_svg(str(DOCS / "session.svg"), title="python chat.py --temp 0")
