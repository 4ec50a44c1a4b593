#!/usr/bin/env bash
# Builds the image that docs/docker-gpu-guide.md runs. The build context is the root of this checkout.
#
#   modeling/transformers/build_docker.sh [options of docker build]
#   IMAGE=tilegym-test modeling/transformers/build_docker.sh --build-arg TORCH="torch==2.11.*"
#
# IMAGE is the image's name (default: tilegym-transformers). Build arguments: BASE_IMAGE, TORCH; behind a proxy also
# HTTPS_PROXY and its like, which docker knows by itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if ! command -v docker >/dev/null 2>&1; then
    echo "error: docker is not installed. Without it: make setup" >&2
    exit 1
fi
exec docker build --tag "${IMAGE:-tilegym-transformers}" --file modeling/transformers/Dockerfile "$@" .
