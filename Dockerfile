# One image per service: docker build --target gateway -t kvmesh-gateway .
#
# Control-plane images hold no torch. Workers get the build of torch that pip's index offers; for
# the CPU build, or an index of your own, pass --secret id=pip.conf,src=<file>: its extra-index-url
# and index-url hold while packages are installed. Build arguments would stay in the image's history,
# and a URL may hold a password; what is mounted does not.
# Code is copied after the dependencies are installed, so changing it does not install them again. It
# is compiled there: a service cannot write what it compiles, and would do it at each start.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN groupadd --gid 10001 kvmesh \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /app kvmesh \
 && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
# An empty package for the editable installs below; `COPY libs` fills it.
RUN mkdir -p libs/kvmesh && touch libs/kvmesh/__init__.py

FROM base AS gateway
RUN --mount=type=secret,id=pip.conf \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install -c constraints.txt -e ".[gateway]"
COPY models models
COPY libs libs
COPY services/__init__.py services/__init__.py
COPY services/gateway services/gateway
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 8000 7000
ENTRYPOINT ["python", "-m", "services.gateway"]

FROM base AS scheduler
RUN --mount=type=secret,id=pip.conf \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install -c constraints.txt -e ".[scheduler]"
COPY libs libs
COPY services/__init__.py services/__init__.py
COPY services/scheduler services/scheduler
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 7000
ENTRYPOINT ["python", "-m", "services.scheduler"]

FROM base AS kvmanager
RUN --mount=type=secret,id=pip.conf \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install -c constraints.txt -e ".[kvmanager]"
COPY libs libs
COPY services/__init__.py services/__init__.py
COPY services/kvmanager services/kvmanager
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 7000
ENTRYPOINT ["python", "-m", "services.kvmanager"]

# For Kubernetes alone.
FROM base AS launcher
RUN --mount=type=secret,id=pip.conf \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install -c constraints.txt -e ".[kubernetes]"
COPY libs libs
COPY services/__init__.py services/__init__.py
COPY services/launcher services/launcher
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 7000
ENTRYPOINT ["python", "-m", "services.launcher"]

# The C++ libraries, for every CPU of this kind of machine; no other image holds a compiler.
FROM base AS native
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
COPY scripts/build_native.py scripts/build_native.py
COPY libs libs
RUN python scripts/build_native.py --levels all

FROM base AS worker
# Some builds of torch bring an OpenMP of another name than the libraries look for.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
RUN --mount=type=secret,id=pip.conf \
    PIP_CONFIG_FILE=/run/secrets/pip.conf pip install -c constraints.txt -e ".[worker,events,outside]"
COPY models models
COPY libs libs
COPY services/__init__.py services/__init__.py
COPY --from=native /app/libs/kvmesh/kernels/*.so libs/kvmesh/kernels/
COPY --from=native /app/libs/kvmesh/transfer/*.so libs/kvmesh/transfer/
# On a device kernels are compiled at run time, when /tmp alone can be written.
ENV TRITON_CACHE_DIR=/tmp/triton

FROM worker AS prefill
COPY services/prefill services/prefill
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 7000 7001
ENTRYPOINT ["python", "-m", "services.prefill"]

FROM worker AS decode
COPY services/decode services/decode
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 7000 7001
ENTRYPOINT ["python", "-m", "services.decode"]

# Workers with the engine vLLM, which has pins of its own: some 3 GB. VLLM_BUILD: cpu or cuda.
FROM base AS worker-vllm
ARG VLLM_BUILD=cpu
# What vLLM's build for CPUs links, and the OpenMP of our libraries.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
COPY constraints-vllm.txt ./
# The last three are builds for CUDA: vLLM's build for CPUs imports them if they are there, and fails.
RUN --mount=type=secret,id=pip.conf if [ "$VLLM_BUILD" = cuda ]; then \
      PIP_CONFIG_FILE=/run/secrets/pip.conf pip install -e ".[worker,events,outside,cuda]" "vllm>=0.31,<0.32"; \
    else \
      PIP_CONFIG_FILE=/run/secrets/pip.conf pip install -c constraints-vllm.txt -e ".[worker,events,outside,vllm]" \
       && pip uninstall --yes torchvision torchaudio torchcodec; \
    fi
COPY models models
COPY libs libs
COPY services/__init__.py services/__init__.py
COPY --from=native /app/libs/kvmesh/kernels/*.so libs/kvmesh/kernels/
COPY --from=native /app/libs/kvmesh/transfer/*.so libs/kvmesh/transfer/
ENV KVMESH_ENGINE__KIND=vllm KVMESH_ENGINE__BLOCK_SIZE=32
# /tmp alone can be written.
ENV TRITON_CACHE_DIR=/tmp/triton VLLM_CACHE_ROOT=/tmp/vllm VLLM_CONFIG_ROOT=/tmp/vllm

FROM worker-vllm AS prefill-vllm
COPY services/prefill services/prefill
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 7000 7001
ENTRYPOINT ["python", "-m", "services.prefill"]

FROM worker-vllm AS decode-vllm
COPY services/decode services/decode
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 7000 7001
ENTRYPOINT ["python", "-m", "services.decode"]

# The ranks of one more host of a worker.
FROM worker-vllm AS ranks-vllm
COPY services/ranks services/ranks
RUN python -m compileall -q --invalidation-mode unchecked-hash libs services
USER 10001:10001
EXPOSE 7000
ENTRYPOINT ["python", "-m", "services.ranks"]
