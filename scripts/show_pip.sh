#!/usr/bin/env bash
# Reads what pip says and shows where it is: one line that changes on a terminal, elsewhere a line per stage.
set -euo pipefail
found=0 stage=

show() { # STAGE TEXT
  if [ -t 1 ]; then
    printf '\r\033[K%.*s' "$(($(tput cols 2>/dev/null || echo 80) - 1))" "$2"
  elif [ "$1" != "$stage" ]; then
    echo "$2"
  fi
  stage=$1
}

show find "looking for packages; all of it takes a few minutes, most of them for torch"
while IFS= read -r line; do
  case $line in
    Collecting\ *)
      found=$((found + 1))
      rest=${line#Collecting }
      show find "found $found packages: ${rest%% *}"
      ;;
    *Downloading\ *) show find "found $found packages: $(sed 's/^ *//' <<<"$line")" ;;
    Installing\ collected*) show install "installing $found packages" ;;
  esac
done
[ ! -t 1 ] || printf '\r\033[K'
