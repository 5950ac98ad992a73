#!/usr/bin/env bash
# Reads what pip says and shows where it is: one line that changes on a terminal, elsewhere a line per stage.
set -euo pipefail
found=0 stage= warned=

show() { # STAGE TEXT
  if [ -t 1 ]; then
    printf '\r\033[K%.*s' "$(($(tput cols 2>/dev/null || echo 80) - 1))" "$2"
  elif [ "$1" != "$stage" ]; then
    echo "$2"
  fi
  stage=$1
}

# Once, as a line that stays.
warn_of_cuda() {
  [ -z "$warned" ] && [ ! -e /dev/nvidiactl ] || return 0
  warned=1
  [ ! -t 1 ] || printf '\r\033[K'
  echo "this torch is built for CUDA, and this machine has no NVIDIA device: it works, but takes 4 GiB more." \
    "For the build without: Ctrl-C, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, and start again"
}

show find "looking for packages; all of it takes a few minutes, most of them for torch"
while IFS= read -r line; do
  case $line in
    Collecting\ *)
      found=$((found + 1))
      rest=${line#Collecting }
      case $rest in nvidia-cublas* | nvidia-cudnn*) warn_of_cuda ;; esac
      show find "found $found packages: ${rest%% *}"
      ;;
    *Downloading\ *) show find "found $found packages: $(sed 's/^ *//' <<<"$line")" ;;
    Installing\ collected*) show install "installing $found packages" ;;
  esac
done
[ ! -t 1 ] || printf '\r\033[K'
