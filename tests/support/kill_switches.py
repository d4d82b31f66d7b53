from tests.support.documents import policy

GUARDED = policy("p", {"pathPrefix": "/guarded"}, limit_keys=["header:x-user-id"])


def switch(key: str = "header:x-user-id", value: str = "bad", **more: object) -> dict[str, object]:
    return {"scope_key": key, "scope_value": value, **more}
