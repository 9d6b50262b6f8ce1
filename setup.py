"""What pyproject.toml cannot say: the recipes, which are in jobs/, are part of the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["raytune_fsdp*"]), "raytune_fsdp.recipes"],
    package_dir={"raytune_fsdp.recipes": "jobs/recipes"},
)
