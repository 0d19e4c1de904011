"""Entry point for tools that still call setup.py; every setting is in pyproject.toml."""

from __future__ import annotations

from setuptools import setup

setup()
