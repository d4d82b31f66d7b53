{{/* Names, cut to what fits a DNS label with room for the longest suffix, `-canary-policies`. */}}
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

{{/* What selects pods and Services: of the release, or with `component` of one track. Takes root and component. */}}
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
      "bundle" (empty .Values.policies.existingConfigMap | ternary .Values.policies.bundle dict)
      "bundleValue" "policies.bundle"
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
      "configMap" $stable.configMap -}}
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
{{- range $option, $key := dict "ca" .caKey "cert" .certKey "key" .keyKey -}}
{{- if $key -}}
{{- $url = printf "%s%s%s=/etc/loopguard/store-tls/%s" $url (contains "?" $url | ternary "&" "?") $option $key -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $url -}}
{{- end }}

{{/* The longest hold of any throttle in a bundle, in milliseconds, and the policy that has it, as JSON. Takes the bundle. */}}
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

{{/* How the kubelet asks whether a pod serves. Its gRPC probes speak no TLS; /readyz says the same. */}}
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

{{/* What Loopguard's certificate is made out to. */}}
{{- define "loopguard.serverName" -}}
{{- default (printf "%s.%s.svc" (include "loopguard.fullname" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end }}
