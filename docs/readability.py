"""The readability of pages: Flesch's reading ease of their prose, without code and tables.

    python docs/readability.py [PAGE ...]

60 to 70 is plain English. Start and the guides must have 50.
"""

import re
import sys
from pathlib import Path

import textstat

DOCS = Path(__file__).parent
LEAST = 50.0


def prose(text: str) -> str:
    """Return the sentences of a page."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    lines = ["" if re.match(r"[|#!<]| {4}\S", line) else line for line in text.splitlines()]
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    text = re.sub(r"`[^`]*`|\*\*", "", text)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
        words = re.sub(r"^(- |\d+\. )", "", " ".join(paragraph.split())).rstrip(" :;,")
        if words:
            found.append(words if words[-1] in ".!?" else f"{words}.")
    return " ".join(found)


def main() -> None:
    pages = [Path(name) for name in sys.argv[1:]]
    pages = pages or [DOCS / "index.md", *sorted((DOCS / "guides").glob("*.md"))]
    ease = {page: textstat.flesch_reading_ease(prose(page.read_text())) for page in pages}
    for page, value in ease.items():
        print(f"{value:6.1f}  {page}")
    if min(ease.values()) < LEAST:
        sys.exit(f"a page is below {LEAST:.0f}: shorten its sentences and its words")


if __name__ == "__main__":
    main()
