# r1 with CUDA. PyPI's torch brings CUDA's libraries; the devel image adds the compiler that Triton and FlashInfer call.
#   docker build -t r1 .
#   docker run --gpus all --ipc host -v "$PWD/runs:/r1/runs" -v ~/.cache/huggingface:/root/.cache/huggingface r1 \
#       launch/single_node.sh --config configs/geo3k.py
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends git python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/r1/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3.12 -m venv /opt/r1

WORKDIR /r1
COPY pyproject.toml README.md LICENSE ./
COPY r1 r1
RUN pip install ".[gpu,loggers]"

COPY configs configs
COPY launch launch
COPY tools tools
CMD ["python", "-m", "r1.train", "--help"]
