"""Routes and filters that let requests bypass Loopguard, for `check-envoy` and real Envoys."""

import json
from functools import cache

import yaml

from tests.support.check_envoy import CHAT, MANAGER, Json, find
from tests.support.envoy_config import bootstrap

ROUTES = f"{MANAGER}/route_config/virtual_hosts/0/routes"
FILTER = f"{MANAGER}/http_filters/0"
_TYPE = "type.googleapis.com"
_TEMPLATE = "envoy.path.match.uri_template.uri_template_matcher"


def good(policies: Json = CHAT) -> Json:
    return json.loads(_read_bootstrap(json.dumps(policies)))


@cache
def _read_bootstrap(policies: str) -> str:
    return json.dumps(yaml.safe_load(bootstrap(json.loads(policies))))


def templated(template: str) -> Json:
    kind = f"{_TYPE}/envoy.extensions.path.match.uri_template.v3.UriTemplateMatchConfig"
    return {
        "path_match_policy": {
            "name": _TEMPLATE,
            "typed_config": {"@type": kind, "path_template": template},
        }
    }


def before(match: Json, document: Json | None = None) -> Json:
    """A configuration with an unguarded route before the guarded one."""
    made = document or good()
    routes = find(made, ROUTES)
    routes.insert(
        0, {"name": "before", "match": match, "route": {"cluster": routes[0]["route"]["cluster"]}}
    )
    return made


def treed(document: Json, *, guarded: bool) -> Json:
    """Routes of the virtual host chosen by a matcher tree."""
    host = find(document, f"{MANAGER}/route_config/virtual_hosts/0")
    route, rest = host.pop("routes")
    kind = f"{_TYPE}/envoy.config.route.v3.Route"
    other = {
        **rest,
        "match": {"prefix": "/chat"},
        **({"typed_per_filter_config": route["typed_per_filter_config"]} if guarded else {}),
    }
    header = {
        "@type": f"{_TYPE}/envoy.type.matcher.v3.HttpRequestHeaderMatchInput",
        "header_name": "x-tier",
    }
    host["matcher"] = {
        "matcher_tree": {
            "input": {"name": "tier", "typed_config": header},
            "exact_match_map": {
                "map": {"gold": {"action": {"name": "r", "typed_config": {"@type": kind, **other}}}}
            },
        },
        "on_no_match": {"action": {"name": "r", "typed_config": {"@type": kind, **route}}},
    }
    return document


def wrapped(document: Json, reads: Json, *, skips: bool = True) -> Json:
    item = find(document, FILTER)
    action = "common.matcher.action.v3.SkipFilter" if skips else "their.Action"
    condition = {
        "single_predicate": {
            "input": {"name": "i", "typed_config": reads},
            "value_match": {"exact": "yes"},
        }
    }
    on_match = {
        "action": {
            "name": "skip",
            "typed_config": {"@type": f"{_TYPE}/envoy.extensions.filters.{action}"},
        }
    }
    item["typed_config"] = {
        "@type": f"{_TYPE}/envoy.extensions.common.matching.v3.ExtensionWithMatcher",
        "xds_matcher": {
            "matcher_list": {"matchers": [{"predicate": condition, "on_match": on_match}]}
        },
        "extension_config": {"name": item["name"], "typed_config": item["typed_config"]},
    }
    return document


def header(name: str) -> Json:
    return {
        "@type": f"{_TYPE}/envoy.type.matcher.v3.HttpRequestHeaderMatchInput",
        "header_name": name,
    }


def rewriting(match: Json, rewrite: Json) -> Json:
    document = before(match)
    find(document, f"{ROUTES}/0/route").update(rewrite)
    return document


def regex(pattern: str, substitution: str) -> Json:
    return {"regex_rewrite": {"pattern": {"regex": pattern}, "substitution": substitution}}


def by_template(text: str) -> Json:
    kind = f"{_TYPE}/envoy.extensions.path.rewrite.uri_template.v3.UriTemplateRewriteConfig"
    return {
        "path_rewrite_policy": {
            "name": "rewrite",
            "typed_config": {"@type": kind, "path_template_rewrite": text},
        }
    }
