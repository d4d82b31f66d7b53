{{/* Names, cut so that a DNS label has room for the longest suffix, `-canary-policies`. */}}
{{- define "loopguard.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 47 | trimSuffix "-" -}}
{{- end }}

{{- define "loopguard.fullname" -}}
{{- $name := include "loopguard.name" . -}}
{{- $default := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $default .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- end }}

{{- define "loopguard.serviceAccountName" -}}
{{- default (.Values.serviceAccount.create | ternary (include "loopguard.fullname" .) "default") .Values.serviceAccount.name -}}
{{- end }}

{{/* Selector labels of the release, or with `component` of one track. Takes root and component. */}}
{{- define "loopguard.selector" -}}
app.kubernetes.io/name: {{ include "loopguard.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Labels of every object. Takes root and component. */}}
{{- define "loopguard.labels" -}}
{{ include "loopguard.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: loopguard
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The policies: those of the values, else the preset; empty if they are in a ConfigMap that Helm cannot see. As JSON. Takes root. */}}
{{- define "loopguard.bundle" -}}
{{- if .Values.policies.existingConfigMap -}}
{}
{{- else if .Values.policies.bundle -}}
{{- toRawJson .Values.policies.bundle -}}
{{- else -}}
{{- dict "bundle_version" 1 "policies" (list (.Files.Get "presets/agents.json" | fromJson)) | toRawJson -}}
{{- end -}}
{{- end }}

{{/* The Deployments: the stable one and, beside it, the canary; a list, as JSON. Takes root. */}}
{{- define "loopguard.tracks" -}}
{{- $name := include "loopguard.fullname" . -}}
{{- $scope := default "" .Values.settings.scope -}}
{{- $stable := dict
      "component" "stable"
      "name" $name
      "replicas" .Values.replicaCount
      "autoscaled" .Values.autoscaling.enabled
      "image" .Values.image
      "shadow" .Values.shadow.enabled
      "scope" $scope
      "bundle" (include "loopguard.bundle" . | fromJson)
      "bundleValue" "policies.bundle"
      "bundleOf" "stable"
      "configMap" (default (printf "%s-policies" $name) .Values.policies.existingConfigMap) -}}
{{- $tracks := list $stable -}}
{{- with .Values.canary -}}
{{- if .enabled -}}
{{- $image := $.Values.image -}}
{{- if or .image.tag .image.digest -}}
{{- $image = merge (pick .image "tag" "digest") (omit $image "tag" "digest") -}}
{{- end -}}
{{- $canary := dict
      "component" "canary"
      "name" (printf "%s-canary" $name)
      "replicas" .replicaCount
      "autoscaled" false
      "image" $image
      "shadow" (or .shadow.enabled $.Values.shadow.enabled)
      "scope" (.shadow.enabled | ternary (printf "%s-canary" $scope | trimPrefix "-") $scope)
      "bundle" dict
      "bundleValue" "canary.policies.bundle"
      "bundleOf" "stable"
      "configMap" $stable.configMap -}}
{{- if or .policies.existingConfigMap .policies.bundle -}}
{{- $_ := set $canary "bundleOf" "canary" -}}
{{- end -}}
{{- if .policies.existingConfigMap -}}
{{- $_ := set $canary "configMap" .policies.existingConfigMap -}}
{{- else if .policies.bundle -}}
{{- $_ := set $canary "configMap" (printf "%s-canary-policies" $name) -}}
{{- $_ := set $canary "bundle" .policies.bundle -}}
{{- end -}}
{{- $tracks = append $tracks $canary -}}
{{- end -}}
{{- end -}}
{{- toJson $tracks -}}
{{- end }}

{{/*
The ConfigMaps of a bundle, as a JSON list of names, files and content; several if the bundle exceeds the size of a ConfigMap. Their
names contain their number, so that pods from before an upgrade keep a complete set. Keys such as `global_shadow` are in every file,
kill switches in the first. Takes bundle and name.
*/}}
{{- define "loopguard.configMaps" -}}
{{- $most := 900000 -}}
{{- $whole := toRawJson .bundle -}}
{{- if le (len $whole) $most -}}
{{- list (dict "name" .name "file" "bundle.json" "json" $whole) | toJson -}}
{{- else -}}
{{- $first := omit .bundle "policies" -}}
{{- $frame := omit $first "kill_switches" "kill_switch_override" -}}
{{- $room := sub (sub $most (len (toRawJson $frame))) 100 -}}
{{- $parts := list -}}
{{- $part := list -}}
{{- $size := len (toRawJson (pick $first "kill_switches" "kill_switch_override")) -}}
{{- range $policy := .bundle.policies -}}
{{- $more := add (len (toRawJson $policy)) 1 -}}
{{- if gt (add $size $more) $room -}}
{{- $parts = append $parts $part -}}
{{- $part = list -}}
{{- $size = 0 -}}
{{- end -}}
{{- $part = append $part $policy -}}
{{- $size = add $size $more -}}
{{- end -}}
{{- $parts = append $parts $part -}}
{{- $made := list -}}
{{- range $number, $policies := $parts -}}
{{- $json := merge (dict "policies" $policies) (eq $number 0 | ternary $first $frame) | toRawJson -}}
{{- $place := add $number 1 -}}
{{- $made = append $made (dict "name" (printf "%s-%d-of-%d" $.name $place (len $parts)) "file" (printf "bundle-%02d.json" $place) "json" $json) -}}
{{- end -}}
{{- toJson $made -}}
{{- end -}}
{{- end }}

{{/* The mount paths of policies, separated by colons: the chart's own, and each team's. Takes root. */}}
{{- define "loopguard.policyPaths" -}}
{{- $paths := list "/etc/loopguard/policies" -}}
{{- range .Values.policies.teams }}{{ $paths = append $paths (printf "/etc/loopguard/teams/%s" .configMap) }}{{ end -}}
{{- join ":" $paths -}}
{{- end }}

{{/* The teams' namespaces, separated by spaces. Takes root. */}}
{{- define "loopguard.namespaces" -}}
{{- $namespaces := list -}}
{{- range $team := .Values.policies.teams -}}
{{- $terms := list -}}
{{- range $key, $kind := dict "hosts" "host" "paths" "path" "routes" "route" "ids" "id" -}}
{{- range default list (get $team $key) }}{{ $terms = append $terms (printf "%s:%s" $kind .) }}{{ end -}}
{{- end -}}
{{- if $terms }}{{ $namespaces = append $namespaces (printf "/etc/loopguard/teams/%s=%s" $team.configMap (join "," $terms)) }}{{ end -}}
{{- end -}}
{{- join " " $namespaces -}}
{{- end }}

{{/* The mounts of policies. Each ConfigMap is a directory, so that a change reaches the process. Takes root. */}}
{{- define "loopguard.policyMounts" -}}
- name: policies
  mountPath: /etc/loopguard/policies
  readOnly: true
{{- range $number, $team := .Values.policies.teams }}
- name: team-{{ $number }}
  mountPath: /etc/loopguard/teams/{{ $team.configMap }}
  readOnly: true
{{- end }}
{{- end }}

{{/* `repository:tag` or `repository@digest`. Takes root and the track's image. */}}
{{- define "loopguard.image" -}}
{{- with .image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default $.root.Chart.AppVersion .tag }}{{ end }}
{{- end -}}
{{- end }}

{{/* The store's URL with the files that TLS needs. */}}
{{- define "loopguard.storeUrl" -}}
{{- $url := .Values.store.url -}}
{{- with .Values.store.tls -}}
{{- if .existingSecret -}}
{{- range $option, $key := dict "ssl_ca_certs" .caKey "ssl_certfile" .certKey "ssl_keyfile" .keyKey -}}
{{- if $key -}}
{{- $url = printf "%s%s%s=/etc/loopguard/store-tls/%s" $url (contains "?" $url | ternary "&" "?") $option $key -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $url -}}
{{- end }}

{{/* The longest hold of a throttle in a bundle, in milliseconds, and its policy, as JSON. Takes the bundle. */}}
{{- define "loopguard.longestHold" -}}
{{- $longest := dict "policy" "" "milliseconds" 0 -}}
{{- range $policy := .policies -}}
{{- $loops := default (list) $policy.spec.loop_detection -}}
{{- range $loop := kindIs "slice" $loops | ternary $loops (list $loops) -}}
{{- $hold := int (default 30000 (get $loop "max_delay_ms")) -}}
{{- $later := default (dict) (get $loop "escalate") -}}
{{- if and (or (eq (default "" (get $loop "action")) "throttle") (get $later "throttle")) (gt $hold (int $longest.milliseconds)) -}}
{{- $longest = dict "policy" $policy.id "milliseconds" $hold -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $longest -}}
{{- end }}

{{/* The kubelet's probe. Its gRPC probes do not support TLS; /readyz is equivalent. */}}
{{- define "loopguard.readiness" -}}
{{- if .Values.tls.existingSecret -}}
httpGet:
  path: /readyz
  port: http-admin
{{- else -}}
grpc:
  port: 50051
{{- end -}}
{{- end }}

{{/* The name in Loopguard's certificate. */}}
{{- define "loopguard.serverName" -}}
{{- default (printf "%s.%s.svc" (include "loopguard.fullname" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end }}
