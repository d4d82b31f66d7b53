# The image of Loopguard: its compiled wheel and the pinned packages it needs in one virtual environment, nothing that built them.
#
#   docker build --tag loopguard .
#   docker run --read-only --publish 50051:50051 --publish 9900:9900 loopguard
#
# Without LOOPGUARD_POLICY, it watches. It builds for amd64 and arm64, and needs no BuildKit.
#
# Reproducible: every package is the file whose hash stands in image.lock.txt, the build tools among them, and bytecode
# carries no time. For the same bases each time, too, give both by digest: --build-arg PYTHON_IMAGE=python@sha256:...

# The same Python twice, once with a C compiler: the environment that is copied runs on the interpreter that made it.
ARG BUILD_IMAGE=python:3.13
ARG PYTHON_IMAGE=python:3.13-slim

FROM ${BUILD_IMAGE} AS build
WORKDIR /src

# The only step that uses the network. Before the sources, so that a change of theirs downloads nothing again.
COPY image.lock.txt ./
RUN pip download --quiet --no-cache-dir --require-hashes --only-binary :all: --dest /wheels --requirement image.lock.txt

# From here on /wheels is all that pip knows: where pyproject.toml asks for what is not pinned, the build fails.
COPY . ./
RUN LOOPGUARD_COMPILED=1 pip wheel --verbose --no-cache-dir --no-index --find-links /wheels --no-deps --wheel-dir /wheels .

# No pip in the environment, and bytecode that is not compared with its source: nobody can change either. Libraries lose the
# symbols that only debuggers read, which are two thirds of some.
RUN python -m venv --without-pip /opt/loopguard \
    && pip --python /opt/loopguard/bin/python install --quiet --no-cache-dir --no-index --find-links /wheels --no-compile \
        /wheels/extproc_loopguard-*.whl \
    && find /opt/loopguard/lib -name '*.so' -exec strip --strip-unneeded {} + \
    && python -m compileall -q --invalidation-mode unchecked-hash /opt/loopguard/lib

FROM ${PYTHON_IMAGE}
# .ci/release gives what .ci/owner.env says.
ARG REVISION=unknown
ARG VENDOR=unknown
ARG LICENSE=unknown
ARG SOURCE_URL=unknown
LABEL org.opencontainers.image.title="Loopguard" \
    org.opencontainers.image.description="Stops runaway AI agents at the gateway, as an Envoy external processor" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.vendor="${VENDOR}" \
    org.opencontainers.image.licenses="${LICENSE}" \
    org.opencontainers.image.source="${SOURCE_URL}"

COPY --from=build /opt/loopguard /opt/loopguard

# The command's own defaults are loopback, where nobody outside of the container could reach it.
ENV PATH=/opt/loopguard/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    LOOPGUARD_LISTEN=0.0.0.0:50051 \
    LOOPGUARD_ADMIN=0.0.0.0:9900
EXPOSE 50051 9900

# A number, because Kubernetes' runAsNonRoot cannot tell who a name is. It owns no file and needs no entry in /etc/passwd.
USER 65532:65532

# Asks where LOOPGUARD_LISTEN says: change that rather than give --listen. Kubernetes ignores this and asks by itself.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s CMD ["loopguard", "healthcheck"]

# `docker stop` waits 10 s unless told otherwise; a full drain takes up to 40 s: --time 45.
ENTRYPOINT ["loopguard"]
CMD ["serve"]
