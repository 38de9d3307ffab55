# plimsoll as an image: not root, nothing written outside /tmp and /var/lib/plimsoll, `plimsoll` as its entry point.
#
#   make image                                    builds the wheels here and the image from them, with buildah, podman or docker
#   docker run --rm --read-only plimsoll plan --gpu H100 -- vllm serve meta-llama/Llama-3.1-8B-Instruct
#
# It is built from the wheels in dist/image alone and reaches no network, so that a site without one can build it, too.
# BASE needs a Python of the version that the wheels are for, with venv; lab/image.sh makes one from Debian's packages.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
COPY dist/image /wheels
RUN python3 -m venv --without-pip /opt/plimsoll \
 && PYTHONPATH="$(echo /wheels/pip-*.whl)" /opt/plimsoll/bin/python -m pip install --no-index --find-links /wheels --no-compile plimsoll-line \
 && /opt/plimsoll/bin/python -m compileall -q -j 0 /opt/plimsoll/lib \
 && mkdir -p /opt/plimsoll/share && /opt/plimsoll/bin/plimsoll inside wheel /opt/plimsoll/share

FROM ${BASE}
COPY --from=build /opt/plimsoll /opt/plimsoll
# /opt/plimsoll/share holds the wheel of plimsoll.inside: an init container copies it next to vLLM (docs/kubernetes.md).
ENV PATH=/opt/plimsoll/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN mkdir -p /var/lib/plimsoll && chown 65532:65532 /var/lib/plimsoll
WORKDIR /var/lib/plimsoll
USER 65532:65532
ENTRYPOINT ["plimsoll"]
CMD ["--help"]
