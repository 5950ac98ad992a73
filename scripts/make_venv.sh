#!/usr/bin/env bash
# Makes an empty virtual environment: make_venv.sh PYTHON FOLDER. Installs Debian's venv package if it
# is missing and we may; otherwise says what to do.
set -euo pipefail
python=$1 folder=$2

command -v "$python" >/dev/null || { echo "install Python 3.11 or newer (Debian: apt-get install python3)" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "$("$python" --version) is too old: KVMesh needs 3.11 or newer; choose one with make PYTHON=python3.12" >&2
  exit 1
}
if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 15))'; then
  echo "the pinned packages have wheels for Python 3.11 to 3.14; if they cannot be installed for $("$python" --version), choose another with make PYTHON=python3.14" >&2
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install $package (Debian, Ubuntu: sudo apt-get install $package) and try again" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null
fi
# It installs pip, which leaves temporary files when it is interrupted: they lie in a folder that goes with this script.
mkdir -p "$folder/tmp"
trap 'rm -rf "$folder/tmp"' EXIT
TMPDIR=$(cd "$folder/tmp" && pwd) "$python" -c '
import signal, sys, venv
signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback at Ctrl-C
venv.main(sys.argv[1:])' "$folder"
