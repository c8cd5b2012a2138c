#!/usr/bin/env bash
# Make (or complete) the virtual environment of one stack: torch, then mmcv with its ops compiled
# against that torch, then the rest, then this package in editable form.
#
#   tools/setup_env.sh [maintained|classic]
#
# The pins are those of requirements.txt and requirements-classic.txt. Running it again takes a
# moment when nothing has changed; after an interruption it goes on with the step it was at.
#   PYTHON=...       interpreter (>= 3.10) to make the environment with
#   TORCH_INDEX=...  package index for torch and torchvision (for instance PyTorch's CPU wheels)
#   MAX_JOBS=...     compiler processes while mmcv's ops are built
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stack=${1:-maintained}
case $stack in
  maintained) venv=.venv requirements=requirements.txt ;;
  classic) venv=.venv-classic requirements=requirements-classic.txt ;;
  *)
    echo "setup_env.sh: unknown stack '$stack'; allowed: maintained, classic" >&2
    exit 2
    ;;
esac
py=$venv/bin/python
stamp=$venv/.inline_mm-ready
log_dir=$venv/setup-logs

say() { printf '\033[1m[setup %s]\033[0m %s\n' "$stack" "$*"; }
die() {
  printf 'setup_env.sh: %s\n' "$*" >&2
  exit 1
}

# The requirements whose name is one of "$@", as the requirements file pins them.
pins() {
  local name
  for name in "$@"; do
    grep -E "^$name([<>=!~]|$)" "$requirements" || die "$requirements pins no '$name'"
  done
}

version_of() {
  "$py" - "$1" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    print(version(sys.argv[1]))
except PackageNotFoundError:
    print('none')
PY
}

# What a finished environment depends on; the stamp of a finished set-up holds this key.
key() {
  cat "$requirements" requirements-test.txt requirements-dev.txt pyproject.toml tools/setup_env.sh \
    inline_mm/version.py | cksum
  pwd
  ls -d "$venv"/lib/python*/site-packages/torch-*.dist-info 2>/dev/null || true
}

if [[ -f $stamp && -x $py && $(<"$stamp") == "$(key)" ]]; then
  exit 0
fi

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  if [[ -n ${PYTHON:-} ]]; then
    die "PYTHON=$PYTHON is no Python >= 3.10"
  fi
  die 'found no Python >= 3.10 among python3, python3.12, python3.11, python3.10, python;' \
    'install one or name it with PYTHON=/path/to/python'
}

pip_log() { # pip_log LOG ARGS...: run pip, show its messages, keep them
  local log=$log_dir/$1.log
  shift
  if ! "$py" -m pip --disable-pip-version-check "$@" 2>&1 | tee "$log" \
    | grep --line-buffered -vE '^(Requirement already satisfied|Looking in)'; then
    # grep fails too where it had nothing to show: only pip's own status counts.
    [[ ${PIPESTATUS[0]} -eq 0 ]] || die "pip failed; its full output is in $log"
  fi
}

gpu_present() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# torch compiles CUDA ops only with a toolkit of the major version it was built with itself.
nvcc_fits_torch() {
  local nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc torch_cuda
  torch_cuda=$("$py" -c 'import torch; print((torch.version.cuda or "none").split(".")[0])')
  "$nvcc" --version 2>/dev/null | grep -q "release $torch_cuda\."
}

ops_load() { "$py" -c 'import torch, mmcv._ext' 2>/dev/null; }
ops_have_cuda() {
  "$py" -c 'from mmcv.ops import get_compiling_cuda_version as v; exit(v() == "not available")' \
    2>/dev/null
}

build_mmcv() { # build_mmcv PIP_OPTIONS...: compile mmcv with its ops, showing ninja's count
  local log=$log_dir/mmcv.log status=0
  local -a environment=(MMCV_WITH_OPS=1)
  local jobs=${MAX_JOBS:-} memory_gb
  if [[ -z $jobs ]]; then
    jobs=$(nproc)
    memory_gb=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
    if ((jobs > memory_gb / 2)); then jobs=$((memory_gb / 2 > 0 ? memory_gb / 2 : 1)); fi
  fi
  environment+=("MAX_JOBS=$jobs")
  if $with_cuda; then
    environment+=(FORCE_CUDA=1)
  else
    # mmcv's build takes any visible GPU for a wish to compile for it.
    environment+=(FORCE_CUDA=0 CUDA_VISIBLE_DEVICES=)
  fi
  env "${environment[@]}" PATH="$PWD/$venv/bin:$PATH" "$py" -m pip --disable-pip-version-check \
    install -v --no-build-isolation --no-deps "$@" "$mmcv" 2>&1 | tee "$log" \
    | grep --line-buffered -oE '^ *\[[0-9]+/[0-9]+\]|^Successfully.*|^ *(Using cached|Downloading) .*' \
    | awk '{ sub(/^ +/, "  "); if ($0 !~ /\]$/ || !(n++ % 5)) { print; fflush() } }' \
    || status=${PIPESTATUS[0]}
  if ((status)); then
    tail -n 30 "$log" >&2
    die "mmcv could not be built; the full output is in $log"
  fi
}

# --- environment -------------------------------------------------------------------------------
if ! "$py" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  say "1/5 virtual environment $venv with $python"
  "$python" -m venv --clear "$venv" || die "'$python -m venv' failed; on Debian and Ubuntu:" \
    'apt-get install python3-venv'
fi
"$py" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || die "$venv holds $("$py" --version), but Python >= 3.10 is needed; remove $venv and try again"
mkdir -p "$log_dir"
rm -f "$stamp"

# --- torch and build tools ---------------------------------------------------------------------
say '2/5 torch and build tools (up to 4 GB of downloads the first time: 2 to 10 minutes)'
torch_pins=$(pins torch torchvision)
build_pins=$(pins setuptools wheel ninja packaging psutil)
mapfile -t torch_pins <<<"$torch_pins"
mapfile -t build_pins <<<"$build_pins"
pip_log build-tools install "${build_pins[@]}"
pip_log torch install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${torch_pins[@]}"

# --- mmcv with its ops -------------------------------------------------------------------------
command -v c++ >/dev/null \
  || die 'found no C++ compiler, which mmcv needs; on Debian and Ubuntu: apt-get install g++'
mmcv=$(grep -E '^(onedl-)?mmcv==' "$requirements")
with_cuda=false
if gpu_present; then
  if nvcc_fits_torch; then
    with_cuda=true
  else
    say 'NOTE: there is a GPU but no nvcc of the CUDA version torch was built with: mmcv gets CPU' \
      'ops only, and detectors will not run on the GPU. See docs/installation.md.'
  fi
fi
say "3/5 $mmcv with its ops (compiles for about 10 minutes on 2 cores, unless pip kept a build)"
if [[ $(version_of "${mmcv%%==*}") != "${mmcv##*==}" ]]; then
  build_mmcv
fi

# --- the rest ----------------------------------------------------------------------------------
say '4/5 mmengine, mmdet, mmsegmentation, timm, pytest, ruff (1 to 3 minutes)'
pip_log rest install --no-build-isolation -r "$requirements" -r requirements-test.txt \
  -r requirements-dev.txt
if ! "$py" -c 'import cv2' 2>/dev/null; then
  # opencv-python wants the system's OpenGL library, which a machine without a screen may lack.
  say 'opencv-python does not load here; using opencv-python-headless'
  pip_log opencv install --force-reinstall --no-deps \
    "opencv-python-headless==$(version_of opencv-python)"
fi
if ! ops_load || { $with_cuda && ! ops_have_cuda; }; then
  # pip's cache does not know which torch, or which GPU, a build was made for.
  say 'the ops pip had kept do not fit this torch or GPU: compiling them again'
  build_mmcv --no-cache-dir --force-reinstall
  ops_load || die "the ops just compiled do not load: $("$py" -c 'import torch, mmcv._ext' 2>&1 | tail -1)"
fi

say '5/5 inline_mm (editable)'
pip_log inline_mm install --no-build-isolation --no-deps -e .
"$py" -c 'import inline_mm'

key >"$stamp"
say "ready: $venv"
