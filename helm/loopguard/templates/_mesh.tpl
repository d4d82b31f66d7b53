{{/* The host of a track in Istio's clusters. Takes root and track. */}}
{{- define "loopguard.istioHost" -}}
{{ .track.name }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.istio.clusterDomain }}
{{- end }}

{{/*
The filters for Istio's Envoys, as JSON: a unique name that routes use to turn it on, the track, the attachment scope, and whether it
only observes. A shadow canary comes before the stable filter, so that it also sees requests that this one refuses. An acting canary
is not attached, because a filter cannot give it a share of the traffic. Takes root.
*/}}
{{- define "loopguard.filters" -}}
{{- $filters := list -}}
{{- range $track := include "loopguard.tracks" . | fromJsonArray -}}
{{- $name := printf "loopguard.%s.%s" $.Release.Namespace $track.name -}}
{{- if eq $track.component "stable" -}}
{{- $filters = append $filters (dict "name" $name "track" $track "observes" (eq $.Values.envoy.shadowMode "observability") "scope" $.Values.istio.scope) -}}
{{- else if $.Values.canary.shadow.enabled -}}
{{- $scope := empty $.Values.istio.scope | ternary "" (printf "%s-canary" $.Values.istio.scope) -}}
{{- $filters = prepend $filters (dict "name" $name "track" $track "observes" true "scope" $scope) -}}
{{- end -}}
{{- end -}}
{{- toJson $filters -}}
{{- end }}

{{/* The processing mode of a guarded route, as YAML. Takes root, filter and the route's bodyMode. */}}
{{- define "loopguard.processingMode" -}}
{{- $envoy := .root.Values.envoy -}}
{{- $partial := or (eq $envoy.bodyMode "tolerant") (eq $envoy.shadowMode "partial") -}}
{{- with .bodyMode }}{{ $partial = eq . "tolerant" }}{{ end -}}
request_header_mode: SEND
request_body_mode: {{ .filter.observes | ternary "STREAMED" ($partial | ternary "BUFFERED_PARTIAL" "BUFFERED") }}
request_trailer_mode: SEND
response_header_mode: {{ .filter.observes | ternary "SKIP" "SEND" }} # so that Loopguard learns of a 413 by Envoy
{{- end }}

{{/*
The filter's settings on a guarded route, as YAML, which replace its own processing mode. Takes root, filter and route.
*/}}
{{- define "loopguard.perRoute" -}}
"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute
overrides:
  {{- with .route.policies }}
  grpc_initial_metadata: [{key: x-loopguard-policy, value: {{ join "," . | quote }}}]
  {{- end }}
  processing_mode: {{- include "loopguard.processingMode" (merge (dict "bodyMode" .route.bodyMode) .) | nindent 4 }}
{{- end }}

{{/*
An ext_proc filter. With named routes, it sends nothing by default. It is not `disabled`: Envoy sets up a request's filters by the
first route that it finds, so a route that is chosen later, by claims or another filter, could not turn it on. Without named routes,
it sends requests to model APIs, on any route. Takes root and filter.
*/}}
{{- define "loopguard.httpFilter" -}}
name: {{ .filter.name }}
typed_config:
  {{- if .root.Values.istio.routes }}
  {{- include "loopguard.processor" . | nindent 2 }}
  {{- else }}
  "@type": type.googleapis.com/envoy.extensions.common.matching.v3.ExtensionWithMatcher
  xds_matcher: {{- .root.Files.Get "envoy/apis.yaml" | trim | nindent 4 }}
  extension_config:
    name: envoy.filters.http.ext_proc
    typed_config: {{- include "loopguard.processor" . | nindent 6 }}
  {{- end }}
{{- end }}

{{/* The configuration of an ext_proc filter. Takes root and filter. */}}
{{- define "loopguard.processor" -}}
{{- $envoy := .root.Values.envoy -}}
{{- $partial := or (eq $envoy.bodyMode "tolerant") (eq $envoy.shadowMode "partial") -}}
{{- $tolerant := or $partial (has "tolerant" (include "loopguard.routeBodyModes" .root | fromJsonArray)) -}}
"@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
stat_prefix: {{ .filter.name }}
grpc_service:
  envoy_grpc:
    cluster_name: outbound|50051||{{ include "loopguard.istioHost" (dict "root" .root "track" .filter.track) }}
    # The default is the cluster's name, whose `|` is invalid in an HTTP/2 authority: Loopguard's sidecar would refuse the
    # stream.
    authority: {{ include "loopguard.istioHost" (dict "root" .root "track" .filter.track) }}
  retry_policy: # if a pod has died, another one answers
    retry_on: connect-failure,refused-stream,reset
    num_retries: 2
    retry_back_off: {base_interval: 0.001s, max_interval: 0.01s}
    retry_host_predicate:
      - name: envoy.retry_host_predicates.previous_hosts
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate
    host_selection_retry_max_attempts: 10
  {{- $metadata := list }}
  {{- with .filter.scope }}{{ $metadata = append $metadata (dict "key" "x-loopguard-scope" "value" .) }}{{ end }}
  {{- /* Loopguard needs the limit to recognize a body that was cut off there. */}}
  {{- if and $tolerant (not .filter.observes) }}{{ $metadata = append $metadata (dict "key" "x-loopguard-buffer-limit" "value" (int $envoy.bufferLimitBytes | toString)) }}{{ end }}
  {{- with $metadata }}
  initial_metadata: {{ toJson . }}
  {{- end }}
{{- if .root.Values.istio.routes }}
processing_mode: {request_header_mode: SKIP, response_header_mode: SKIP}
{{- else }}
processing_mode: {{- include "loopguard.processingMode" . | nindent 2 }}
{{- end }}
{{- if .filter.observes }}
observability_mode: true
failure_mode_allow: true # otherwise requests would fail while Loopguard is down
deferred_close_timeout: 5s
{{- else }}
{{- if $tolerant }}
allow_content_length_header: true
{{- end }}
failure_mode_allow: {{ or (eq $envoy.failureMode "allow") (eq $envoy.shadowMode "partial") }}
message_timeout: {{ divf $envoy.messageTimeoutMilliseconds 1000 }}s
max_message_timeout: {{ int $envoy.maxMessageTimeoutSeconds }}s
{{- end }}
request_attributes:
  - source.address
  - xds.route_name
  {{- if has true (include "loopguard.hasRouteBundles" .root | fromJsonArray) }}
  - xds.route_metadata.filter_metadata['loopguard']['policy_json']
  {{- end }}
metadata_options:
  forwarding_namespaces: {untyped: [envoy.filters.http.jwt_authn]}
  {{- if not .filter.observes }}
  receiving_namespaces: {untyped: [loopguard]}
  {{- end }}
{{- end }}

{{/*
A patch of a track's cluster that detects pods that hang or are gone, as `envoy-config` prints it. A DestinationRule has neither
HTTP/2 pings nor health checks, and its outlier detection would also keep requests in a zone. In ambient mode the mesh may route
health checks and requests differently, so AUTO has none. Takes root and track.
*/}}
{{- define "loopguard.health" -}}
{{- $health := .root.Files.Get "envoy/cluster.yaml" | fromYaml -}}
{{- if eq .root.Values.istio.tls "AUTO" -}}
{{- $_ := unset $health "health_checks" -}}
{{- else -}}
{{- $check := index $health.health_checks 0 "grpc_health_check" -}}
{{- $_ := set $check "authority" (include "loopguard.istioHost" (dict "root" .root "track" .track)) -}}
{{- end -}}
{{- toYaml $health -}}
{{- end }}

{{/* The header that shows clients a warning, as YAML; not added if there is none. */}}
{{- define "loopguard.warning" -}}
- header: {key: x-fairvisor-warning, value: "%DYNAMIC_METADATA(loopguard:warning)%"}
  append_action: OVERWRITE_IF_EXISTS_OR_ADD
{{- end }}

{{/* The access log that reports to the stable track how requests end. Takes root. */}}
{{- define "loopguard.entries" -}}
{{- $stable := include "loopguard.tracks" . | fromJsonArray | last -}}
{{- range $track := include "loopguard.tracks" . | fromJsonArray }}{{ if eq $track.component "stable" }}{{ $stable = $track }}{{ end }}{{ end -}}
{{- $host := include "loopguard.istioHost" (dict "root" . "track" $stable) -}}
{{- $service := printf "{envoy_grpc: {cluster_name: outbound|50051||%s, authority: %s}}" $host $host -}}
{{- .Files.Get "envoy/entries.yaml" | replace "{envoy_grpc: {cluster_name: loopguard}}" $service -}}
{{- end }}

{{/* The filters that read tokens in answers, for requests of a session, as YAML. Takes root. */}}
{{- define "loopguard.usageFilters" -}}
{{- $filters := list -}}
{{- if and (eq .Values.envoy.usage "exact") (ne .Values.envoy.shadowMode "observability") -}}
{{- $digits := int .Values.envoy.bufferLimitBytes | toString | len -}}
{{- $text := .Files.Get "envoy/usage.yaml" | replace "[0-9]{8,}" (printf "[0-9]{%d,}" $digits) -}}
{{- range $filter := fromYamlArray $text -}}
{{- $name := printf "loopguard.%s.%s.%s" $.Release.Namespace (include "loopguard.fullname" $) (last (splitList "." $filter.name)) -}}
{{- $filters = append $filters (set $filter "name" $name) -}}
{{- end -}}
{{- end -}}
{{- toYaml $filters -}}
{{- end }}

{{/* The EnvoyFilter's name, unique among releases that share its namespace. Takes root. */}}
{{- define "loopguard.envoyFilterName" -}}
{{- $name := include "loopguard.fullname" . -}}
{{- $there := default .Release.Namespace .Values.istio.namespace -}}
{{- eq $there .Release.Namespace | ternary $name (printf "%s-%s" .Release.Namespace $name) -}}
{{- end }}

{{/* The body modes of the routes, as JSON; empty for the default. Takes root. */}}
{{- define "loopguard.routeBodyModes" -}}
{{- $found := list -}}
{{- range .Values.istio.routes }}{{ $found = append $found (default "" .bodyMode) }}{{ end -}}
{{- toJson $found -}}
{{- end }}

{{/* Whether each route has its own bundle, as a JSON list. Takes root. */}}
{{- define "loopguard.hasRouteBundles" -}}
{{- $found := list -}}
{{- range .Values.istio.routes }}{{ $found = append $found (not (empty .bundle)) }}{{ end -}}
{{- toJson $found -}}
{{- end }}

{{/*
Envoy Gateway's messageTimeout. There is no maxMessageTimeout, so it must include the longest throttle. In shadow mode nothing is
held; for policies that Helm cannot see, it is the maximum. A Gateway API duration has at most five digits per unit, so whole seconds
are written as seconds. Takes root.
*/}}
{{- define "loopguard.wholeTimeout" -}}
{{- $needed := mul 1000 .Values.envoy.maxMessageTimeoutSeconds -}}
{{- if or .Values.shadow.enabled (not .Values.policies.existingConfigMap) -}}
{{- $hold := include "loopguard.longestHold" (.Values.shadow.enabled | ternary dict (include "loopguard.bundle" . | fromJson)) | fromJson -}}
{{- $needed = max .Values.envoy.messageTimeoutMilliseconds (empty $hold.policy | ternary 0 (add $hold.milliseconds 2000)) -}}
{{- end -}}
{{- with div $needed 1000 }}{{ . }}s{{ end -}}
{{- with mod $needed 1000 }}{{ . }}ms{{ end -}}
{{- end }}

{{/*
Labels and annotations that give Loopguard's pods an Istio sidecar, as JSON. It stays until the process has drained, and does not
intercept Prometheus, which has no mesh certificate. Istio's telemetry needs the version. Takes root.
*/}}
{{- define "loopguard.sidecar" -}}
{{- $made := dict "labels" dict "annotations" dict -}}
{{- if and .Values.istio.enabled (eq .Values.istio.tls "ISTIO_MUTUAL") -}}
{{- $drain := addf .Values.drain.delaySeconds .Values.drain.timeoutSeconds | ceil | int -}}
{{- $_ := set $made "labels" (dict "sidecar.istio.io/inject" "true" "version" .Chart.AppVersion) -}}
{{- $_ := set $made "annotations" (dict
      "proxy.istio.io/config" (dict "terminationDrainDuration" (printf "%ds" $drain) | toJson)
      "traffic.sidecar.istio.io/excludeInboundPorts" "9900") -}}
{{- end -}}
{{- toJson $made -}}
{{- end }}

{{/* The targets of a Gateway API policy, else the whole Gateway, as YAML. Takes gateway and targetRefs. */}}
{{- define "loopguard.targetRefs" -}}
{{- range default (list (dict "kind" "Gateway" "name" .gateway)) .targetRefs }}
- group: gateway.networking.k8s.io
  kind: {{ default "HTTPRoute" .kind }}
  name: {{ .name | quote }}
  {{- with .sectionName }}
  sectionName: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Headers to remove from client requests, as YAML. */}}
{{- define "loopguard.removedHeaders" -}}
- x-fairvisor-warning # remove Loopguard's own headers from client requests
- x-loopguard-steered
- x-loopguard-narrowed
# And headers that make Envoy repeat a counted request.
- x-envoy-hedge-on-per-try-timeout
- x-envoy-max-retries
- x-envoy-retriable-header-names
- x-envoy-retriable-status-codes
- x-envoy-retry-grpc-on
- x-envoy-retry-on
- x-envoy-upstream-rq-per-try-timeout-ms
{{- end }}
