"""Observe long work."""


class Progress:
    """Ignore the steps of long work. The command line shows them by subclasses."""

    def stage(self, name: str, total: int, kept: int = 0, work: int = 0) -> None:
        """Begin a stage of `total` steps; an earlier run has done `kept` of them.

        work: work of the other steps in all, for steps that take different times; 0 for a unit a step.
        """

    def advance(self, text: str, work: int = 1) -> None:
        """Count a step of so much work as done; `text` names the finished step or the next step."""

    def best(self, text: str) -> None:
        """Show the best result so far."""

    def note(self, text: str) -> None:
        """Print a separate line."""
