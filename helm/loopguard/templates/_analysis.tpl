{{- /*
The queries about a canary, as JSON: name -> query, limit and its good side. With too few requests a query has no result, which is
neither a success nor a failure.

Takes root, and as in the queries: policy, a regular expression; window; least, the minimum number of requests.
*/ -}}
{{- define "loopguard.analysis" -}}
{{- $on := printf "namespace=\"%s\",job=~\"%s(-canary)?\"" .root.Release.Namespace (include "loopguard.fullname" .root) -}}
{{- $of := printf "%s,policy=~\"%s\"" $on .policy -}}
{{- $requests := printf "sum(increase(loopguard_canary_requests_total{%s}[%s]))" $of .window -}}
{{- $differing := printf "sum(increase(loopguard_canary_requests_total{%s,verdict=~\"only_live|only_candidate\"}[%s]))" $of .window -}}
{{- $refused := printf "sum(increase(loopguard_canary_refused_total{%s}[%s]))" $of .window -}}
{{- $new := printf "sum(increase(loopguard_canary_refusals_total{%s,refusal=\"extra\"}[%s]))" $of .window -}}
{{- $decided := printf "sum(increase(loopguard_decision_seconds_count{%s}[%s]))" $on .window -}}
{{- $open := printf "sum(increase(loopguard_fail_open_total{%s}[%s]))" $on .window -}}
{{- $buckets := printf "sum by (le) (rate(loopguard_decision_seconds_bucket{%s}[%s]))" $on .window -}}
{{- dict
  "new-refusals" (printf "%s / (%s - %s >= %s)" $new $requests $refused .least)
  "disagreement" (printf "%s / (%s >= %s)" $differing $requests .least)
  "requests" (printf "%s > 0" $requests)
  "fail-open" (printf "%s / (%s > 0)" $open $decided)
  "decision-p99" (printf "histogram_quantile(0.99, %s) >= 0" $buckets)
| toJson -}}
{{- end -}}
