"""Files that settings name are mounted, or refused."""

import pytest

from tests.support.chart import Values, environment, merged, objects, one, problems

MOUNTED: Values = {
    "extraVolumes": [{"name": "extra", "secret": {"secretName": "keys"}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
HOW = "mount one there with extraVolumes and extraVolumeMounts."


def test_extra_volumes_and_variables_are_added() -> None:
    extra = merged(
        MOUNTED, {"extraEnv": [{"name": "TZ", "value": "UTC"}], "canary": {"enabled": True}}
    )

    for name in ("lg-loopguard", "lg-loopguard-canary"):
        deployment = one(objects(extra), "Deployment", name)
        pod = deployment["spec"]["template"]["spec"]

        assert MOUNTED["extraVolumes"][0] in pod["volumes"]
        assert MOUNTED["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]
        assert environment(deployment)["TZ"] == "UTC"


MODULE = (
    "store.url names a credential_provider, and the image has no such module: mount its folder "
    "with extraVolumes and "
    "extraVolumeMounts, and name that folder as PYTHONPATH in extraEnv."
)
SECRET = "leave it out and name a Secret in"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"settings": {"hashKeyFile": "/keys/hash"}},
            (
                f"settings.hashKeyFile=/keys/hash is in no volume of the pod: {SECRET} "
                f"hashKey.existingSecret, or {HOW}"
            ),
        ),
        (
            {"settings": {"hashKeyFile": "hash.key"}},
            (
                f"settings.hashKeyFile=hash.key is in no volume of the pod: {SECRET} "
                f"hashKey.existingSecret, or {HOW}"
            ),
        ),
        (
            {"settings": {"events": "-", "eventsSecretFile": "/keys/s"}},
            (
                f"settings.eventsSecretFile=/keys/s is in no volume of the pod: {SECRET} "
                f"events.existingSecret, or {HOW}"
            ),
        ),
        (
            {"settings": {"events": "https://e", "eventsCa": "/extras/ca.crt"}, **MOUNTED},
            (
                f"settings.eventsCa=/extras/ca.crt is in no volume of the pod: {SECRET} "
                f"events.existingSecret, or {HOW}"
            ),
        ),
        (
            {"settings": {"events": "/log/events"}},
            f"settings.events=/log/events is in no volume of the pod: {HOW}",
        ),
        (
            {"settings": {"adminSocket": "/run/a.sock"}},
            f"settings.adminSocket=/run/a.sock is in no volume of the pod: {HOW}",
        ),
        (
            {"store": {"url": "rediss://r?ssl_ca_certs=%2Fkeys%2Fca.crt"}},
            (
                f"store.url?ssl_ca_certs=/keys/ca.crt is in no volume of the pod: {SECRET} "
                f"store.tls.existingSecret, or {HOW}"
            ),
        ),
        (
            {"store": {"url": "rediss://r?credential_provider=ours:make"}, **MOUNTED},
            MODULE,
        ),
        (
            merged(
                MOUNTED,
                {"hashKey": {"existingSecret": "s"}, "settings": {"hashKeyFile": "/extra/k"}},
            ),
            (
                "hashKey.existingSecret and settings.hashKeyFile both name the key: leave one of "
                "them "
                "out."
            ),
        ),
        (
            {"events": {"existingSecret": "s"}},
            (
                "events.existingSecret is for events, and none are sent: say where to in "
                "settings.events, or leave it out."
            ),
        ),
        (
            merged(
                MOUNTED,
                {
                    "events": {"existingSecret": "s"},
                    "settings": {"events": "-", "eventsCa": "/extra/ca"},
                },
            ),
            (
                "events.existingSecret takes the place of settings.eventsSecretFile and "
                "settings.eventsCa: leave these out."
            ),
        ),
        (
            {"extraEnv": [{"name": "LOOPGUARD_LOG_FORMAT", "value": "text"}]},
            (
                "extraEnv names LOOPGUARD_LOG_FORMAT, which the chart sets from other values: "
                "change "
                "these."
            ),
        ),
        (
            {"extraVolumes": [{"name": "policies", "emptyDir": {}}]},
            (
                "extraVolumes has a volume named policies, as the pod has already: choose another "
                "name."
            ),
        ),
        (
            {"extraVolumeMounts": [{"name": "lost", "mountPath": "/x"}]},
            "extraVolumeMounts mounts lost, which is no volume of the pod: add it to extraVolumes.",
        ),
    ],
)
def test_unmounted_file_is_refused(values: Values, sentence: str) -> None:
    assert problems(values) == [sentence]


@pytest.mark.parametrize(
    "values",
    [
        {
            "settings": {
                "hashKeyFile": "/extra/hash.key",
                "events": "/extra/events",
                "adminSocket": "/extra/admin.sock",
            }
        },
        {
            "settings": {
                "events": "https://events.example.com",
                "eventsCa": "/etc/ssl/certs/ca-certificates.crt",
            }
        },
        {"settings": {"events": "-", "eventsSecretFile": ""}},
        {
            "store": {
                "url": "rediss://r?ssl_ca_certs=/extra/ca.crt&ssl_certfile=/extra/c&ssl_keyfile=/extra/k"
            }
        },
        {
            "store": {"url": "redis://r?credential_provider=ours:make"},
            "extraEnv": [{"name": "PYTHONPATH", "value": "/extra"}],
        },
    ],
)
def test_mounted_files_are_accepted(values: Values) -> None:
    assert objects(merged(MOUNTED, values))
