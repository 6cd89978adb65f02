"""`kerneltune history`: how the committed records of a file changed over git revisions, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, note, width, write
from kerneltune.cli.files import selected, takes
from kerneltune.table import counted

if TYPE_CHECKING:
    from kerneltune.plan import Selection

_REVISIONS = 100


@o.selects()
def command(
    wanted: "Selection",
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file of records that git has revisions of.")],
    most: Annotated[int, o.count("--max", "Revisions at most, the newest.")] = _REVISIONS,
    every: Annotated[bool, typer.Option("--all", help="Rows without a change point as well.")] = False,
    page: Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write an HTML page with a curve per row.")] = None,
    style: o.Style = "text",
    output: o.Output = None,
) -> None:
    """Show the trend of every row over git revisions: change points and their causes (code, config, compiler, GPU serial, noise).

    A change point is a change of more than 3 % and of more than the row's noise, with intervals apart. Its cause is what differs
    between the two records; noise means that nothing does.
    """
    from kerneltune.reporting.history import revisions, trends
    from kerneltune.reporting.trends import trend_page, trend_table

    found, broken = revisions(path, most)
    for line in broken:
        note(f"left out: {line}")
    timed = trends(found)
    selected([trend.points[-1].record for trend in timed], wanted)  # a name that no row has is an error
    rows = [trend for trend in timed if takes(wanted, trend.points[-1].record)]
    if not rows:
        raise ValueError(f"{path}: no timed row of these names in {counted(len(found), 'revision')}")
    if page is not None:
        span = f"{found[0].day} to {found[-1].day}"
        write(page, trend_page(rows, f"{path.name} over {len(found)} revisions, {span}"))
    deliver(trend_table(rows, every).render(style, width()), output)
