#!/usr/bin/env bash
# Gradescope runs this once, where the bundle is unpacked: it installs Python and what the grader needs, without CUDA.
set -euo pipefail
cd "${AUTOGRADER:-/autograder}/source"
tar --extract --gzip --file zero-grader.tar.gz
apt-get update
# Ubuntu 22.04 has Python 3.11 beside its own, which is too old; 24.04 has one that is new enough.
apt-get install --yes python3.11 python3.11-venv || apt-get install --yes python3 python3-venv
"$(command -v python3.11 || command -v python3)" -m venv .venv
.venv/bin/python -m pip install --constraint zero-grader/constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu --editable zero-grader
