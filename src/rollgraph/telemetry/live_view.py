"""The picture of a run in a terminal, redrawn in place by a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rollgraph.telemetry.run_picture import RunPicture

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class LiveView(RunPicture):
    """Notes scroll by above the picture."""

    def __init__(self, total_steps: int, console: Console) -> None:
        from rich.live import Live

        super().__init__(total_steps)
        self._console = console
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()  # draws once more and shows the cursor again

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def _draw(self) -> RenderableType:
        return self.render(self._console.width)
