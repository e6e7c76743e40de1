#!/bin/sh
# Makes the start of both trainings: some minutes on two cores of a CPU.
set -e
python make_start.py
python -m headrace.cli sft sft.yaml
