"""Maps the folders at the root to ``slipstream.<folder>``; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("core", "algos", "distill", "rollout", "trainer", "cluster", "recipes")

setup(
    packages=[f"slipstream.{name}" for top in FOLDERS for name in [top, *(f"{top}.{sub}" for sub in find_packages(top))]],
    package_dir={f"slipstream.{top}": top for top in FOLDERS},
    package_data={f"slipstream.{top}": ["py.typed", "*.yaml"] for top in FOLDERS},
)
