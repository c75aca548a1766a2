# The trainers' image: git archive HEAD | docker build --tag IMAGE --file launch/kubernetes/trainer.Dockerfile -
FROM python:3.12-slim
WORKDIR /opt/rljax
# Where GKE puts the driver's libraries. Without them JAX finds no GPU.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY . .
# kubernetes 36.0.0 sends no token from inside a pod, so that the API server refuses JAX's detection.
RUN python3 -m pip install --no-cache-dir --editable '.[gpu]' 'jax[k8s]' 'kubernetes!=36.0.0'
