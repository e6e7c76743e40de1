#!/bin/sh
# Makes the Python, the environment and the model that run.yaml names, and trains. ARGUMENTS override its values.
set -e
[ -x openenv-venv/bin/openenv ] || { python -m venv openenv-venv && openenv-venv/bin/pip install -q openenv==0.10.0; }
[ -d echo_env ] || openenv-venv/bin/openenv init echo_env
[ -d tiny-game-model ] || python ../textarena/make_model.py tiny-game-model
headrace train run.yaml "$@"
