"""What can be wrong with a row: a kind to count it by, the problem, and what mends it."""


class RowError(ValueError):
    """A row that cannot become a prompt. Its text is what goes after 'row 17 '."""

    def __init__(self, kind: str, problem: str, fix: str = "") -> None:
        """
        Args:
            kind: a few words that are the same for all rows with this fault, as in 'picture cut short'.
            problem: a predicate about this row, as in 'has no prompt'.
            fix: what to do, in the imperative.
        """
        super().__init__(kind, problem, fix)
        self.kind, self.problem, self.fix = kind, problem, fix

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}" if self.fix else self.problem

    def of(self, subject: str) -> "RowError":
        """The same fault with the row's name before it."""
        return RowError(self.kind, f"{subject} {self.problem}", self.fix)


class ImageError(RowError):
    """A picture that cannot be read or has no size that the model takes; its text is a sentence of its own."""
