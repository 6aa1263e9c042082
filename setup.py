"""Adds `config/` to the wheel as `refocused/shipped`; all else is in `pyproject.toml`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["refocused*"]), "refocused.shipped"],
    package_dir={"refocused.shipped": "config"},
    package_data={
        "refocused": ["py.typed"],
        "refocused.estimate": ["plan_page.md"],
        "refocused.monitor.screen": ["page.html", "live_screen.tcss", "uplot/*"],
        "refocused.shipped": ["*.yaml", "*/*"],
    },
    include_package_data=False,
)
