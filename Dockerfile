# plimsoll as an image: not root, nothing written outside /tmp and /var/lib/plimsoll, `plimsoll` as its entry point.
#
#   make image                                    builds the wheels here and the image from them, with buildah, podman or docker
#   docker run --rm --read-only plimsoll plan --gpu H100 -- vllm serve meta-llama/Llama-3.1-8B-Instruct
#
# It is built from the wheels in dist/image alone and reaches no network, so that a site without one can build it, too.
# BASE needs a Python of the version that the wheels are for, with venv; lab/image.sh makes one from Debian's packages.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
ARG EXTRAS=
COPY dist/image /wheels
ENV NUMBA_CPU_NAME=generic
RUN python3 -m venv --without-pip /opt/plimsoll \
 && PYTHONPATH="$(echo /wheels/pip-*.whl)" /opt/plimsoll/bin/python -m pip install --no-index --find-links /wheels --no-compile "plimsoll-line${EXTRAS}" \
 && /opt/plimsoll/bin/python -m compileall -q -j 0 /opt/plimsoll/lib \
 && mkdir -p /opt/plimsoll/share && /opt/plimsoll/bin/plimsoll inside wheel /opt/plimsoll/share \
 && for groups in full:16 full:16,sliding:16:64; do \
      case "${EXTRAS}" in *simulate*|*all*) XDG_CACHE_HOME=/opt/plimsoll/share /opt/plimsoll/bin/plimsoll simulate \
        synthetic:requests=9,families=2 --replicas 2 --groups "$groups" ;; esac; done \
 && chmod -R a+rX /opt/plimsoll/share

FROM ${BASE}
COPY --from=build /opt/plimsoll /opt/plimsoll
# /opt/plimsoll/share holds the wheel of plimsoll.inside: an init container copies it next to vLLM (docs/kubernetes.md).
# Of what EXTRAS=simulate compiled, every container takes a copy instead of compiling again.
ENV NUMBA_CPU_NAME=generic PLIMSOLL_COMPILED=/opt/plimsoll/share/plimsoll/compiled
ENV PATH=/opt/plimsoll/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN mkdir -p /var/lib/plimsoll && chown 65532:65532 /var/lib/plimsoll
WORKDIR /var/lib/plimsoll
USER 65532:65532
ENTRYPOINT ["plimsoll"]
CMD ["--help"]
