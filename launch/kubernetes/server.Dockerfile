# The servers' image: git archive HEAD | docker build --tag IMAGE --file launch/kubernetes/server.Dockerfile -
FROM vllm/vllm-openai:v0.32.0
WORKDIR /opt/rljax
COPY . .
RUN python3 -m pip install --no-cache-dir --no-deps --editable . \
    && python3 launch/plugin_needs.py | xargs -d '\n' python3 -m pip install --no-cache-dir
ENTRYPOINT []
