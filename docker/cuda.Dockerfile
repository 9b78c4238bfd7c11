# Train on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t kit:cuda .
# The image's CUDA is that of torch's own wheels (constraints.txt), because DeepSpeed compiles its operators with it.
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04
# A pinned version would be gone from the archive with the next one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libaio-dev make openssh-client pdsh python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /kit
COPY . .
RUN make setup PYTHON=python3 \
    && rm -rf /root/.cache/pip
ENV PATH="/kit/.venv/bin:${PATH}"
WORKDIR /work
ENTRYPOINT ["kit"]
CMD ["--help"]
