"""Colours by what they stand for, on light and on dark ground.

Every colour of a line, a label or an area has a contrast of 3 to its ground, and that of text 4.5 (WCAG 2.2, AA).
The colours of phases, those of the first four runs and those of the other four, whose lines are dashed, can be told
apart with any of the three weaknesses of colour vision.
"""

LIGHT: dict[str, str] = {
    "ground": "#ffffff",
    "ink": "#1b1f24",
    "soft": "#59616b",
    "line": "#d5d9df",
    "run0": "#14469c",
    "run1": "#b93f0b",
    "run2": "#08855e",
    "run3": "#954280",
    "run4": "#926a00",
    "run5": "#9e0040",
    "run6": "#006f99",
    "run7": "#727379",
    "compute": "#5b5d74",
    "compress": "#cb7d1b",
    "exchange": "#2357af",
    "decode": "#2d9464",
    "update": "#a174b7",
    "other": "#7d979a",
}
DARK: dict[str, str] = {
    "ground": "#15181d",
    "ink": "#eceff3",
    "soft": "#a9b2bd",
    "line": "#3a414b",
    "run0": "#459bf4",
    "run1": "#f98c49",
    "run2": "#67f0bb",
    "run3": "#d090c1",
    "run4": "#d4b72c",
    "run5": "#e3718d",
    "run6": "#30bfe6",
    "run7": "#d3e5e6",
    "compute": "#7283a7",
    "compress": "#ffad40",
    "exchange": "#6b9df7",
    "decode": "#4fe3ba",
    "update": "#dabff5",
    "other": "#8d786f",
}
