"""What an error says, on one line. Imports nothing."""

_LONGEST = 200


def first_line(error: BaseException) -> str:
    """`TypeError: text`, where the text is the first line that says something; the type alone where none does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__
