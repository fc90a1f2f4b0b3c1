"""Colours by what they stand for, on light and on dark ground.

Every colour of a line, a label or an area has a contrast of 3 to its ground, and that of text 4.5 (WCAG 2.2, AA).
Neighbours among the colours of runs differ in lightness or in hue as people with a red-green weakness see it.
"""

LIGHT: dict[str, str] = {
    "ground": "#ffffff",
    "ink": "#1b1f24",
    "soft": "#59616b",
    "line": "#d5d9df",
    "run0": "#0a5fb0",
    "run1": "#b34700",
    "run2": "#00715a",
    "run3": "#8b3a8e",
    "run4": "#7a5d00",
    "run5": "#b52a62",
    "run6": "#006c82",
    "run7": "#4f5863",
    "compute": "#6f7c8f",
    "compress": "#cc6a00",
    "exchange": "#0a70c4",
    "decode": "#00876c",
    "update": "#9b82bd",
    "other": "#8f8f8f",
}
DARK: dict[str, str] = {
    "ground": "#15181d",
    "ink": "#eceff3",
    "soft": "#a9b2bd",
    "line": "#3a414b",
    "run0": "#6cb4ff",
    "run1": "#ff9f5f",
    "run2": "#45cfa6",
    "run3": "#d99be3",
    "run4": "#dfc14f",
    "run5": "#ff8fb6",
    "run6": "#62cfe2",
    "run7": "#bac3ce",
    "compute": "#8d9db3",
    "compress": "#f29a3f",
    "exchange": "#56a8f5",
    "decode": "#2fbf9d",
    "update": "#b9a4da",
    "other": "#8b8b8b",
}
