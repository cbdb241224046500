# rlpool on a CPU. By default, a container collects episodes of real environments in worker processes.
#
#     docker build --tag rlpool .
#     docker run --rm rlpool
#     docker run --rm rlpool python tutorials/ppo.py --total-timesteps 100000
#
# Workers share anonymous memory, not /dev/shm: --shm-size is not needed.
FROM python:3.13-slim

# Index of PyTorch's builds without CUDA, which are several gigabytes smaller.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /rlpool
COPY constraints.txt ./
RUN python -m pip install --extra-index-url "$TORCH_INDEX" -c constraints.txt torch
COPY LICENSE README.md pyproject.toml setup.cfg ./
COPY rlpool rlpool
COPY tutorials tutorials
RUN python -m pip install -c constraints.txt ".[tutorials]"

# Scripts write plots and checkpoints to the current directory.
RUN useradd --create-home researcher && chown researcher: .
USER researcher
CMD ["python", "tutorials/multiprocess_episode_batcher.py"]
