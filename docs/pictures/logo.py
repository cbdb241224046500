"""Draw the logo: three lanes with consecutive episodes of different lengths.

    python docs/pictures/logo.py --output docs/pictures/logo.svg

The colours are legible on light and dark backgrounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SIZE, HEIGHT, GAP = 96, 20, 4  # pixels: the picture, a lane, and the space between two episodes
LANES = ((54, 38), (26, 66), (70, 22))  # lengths of episodes
COLOURS = ("#26a69a", "#ffb300")  # alternating


def drawing() -> str:
    """Return the logo as SVG."""
    bars = []
    for lane, lengths in enumerate(LANES):
        x, y = GAP, GAP + lane * (HEIGHT + 14)
        for number, length in enumerate(lengths):
            place = f'x="{x}" y="{y}" width="{length - GAP}" height="{HEIGHT}" rx="6"'
            bars.append(f'<rect {place} fill="{COLOURS[(lane + number) % 2]}"/>')
            x += length
    box = f'viewBox="0 0 {SIZE} {SIZE}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(bars)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="logo.svg", type=Path)
    parser.parse_args().output.write_text(drawing(), encoding="utf-8")


if __name__ == "__main__":
    main()
