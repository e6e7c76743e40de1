#!/bin/sh
# Supervised training on a file, and then training with rewards: some minutes on two cores of a CPU.
set -e
python make_texts.py
headrace sft sft.yaml run.dir=runs/sft
headrace train train.yaml model.path=runs/sft/model run.dir=runs/train
