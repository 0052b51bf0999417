{{- /* The first in a list that is not null; 0 counts. */ -}}
{{- define "tandem.first" -}}
{{- range . }}{{ if not (kindIs "invalid" .) }}{{ . }}{{ break }}{{ end }}{{ end -}}
{{- end -}}

{{- define "tandem.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* Gives a pod's spec what all pods get: `pod` is the spec, `group` its values, `root` the chart's. Prints nothing. */ -}}
{{- define "tandem.pod" -}}
{{- $values := .root.Values }}
{{- $container := index .pod.containers 0 }}
{{- $_ := set $container "image" (include "tandem.image" .root) }}
{{- $env := $container.env }}
{{- $volumes := .pod.volumes | default list }}
{{- $mounts := $container.volumeMounts | default list }}
{{- with $values.secrets.hubToken }}
{{- $secret := dict "name" . "key" "token" "optional" false }}
{{- $env = append $env (dict "name" "HF_TOKEN" "valueFrom" (dict "secretKeyRef" $secret)) }}
{{- end }}
{{- if $values.modelVolume.enabled }}
{{- $env = concat $env (list (dict "name" "TANDEM_CACHE" "value" "/models/tandem") (dict "name" "HF_HOME" "value" "/models/hub")) }}
{{- $volumes = append $volumes (dict "name" "models" "persistentVolumeClaim" (dict "claimName" (printf "%s-models" .root.Release.Name))) }}
{{- $mounts = append $mounts (dict "name" "models" "mountPath" "/models") }}
{{- $_ := set .pod "securityContext" (dict "fsGroup" 1000 "fsGroupChangePolicy" "OnRootMismatch") }}
{{- end }}
{{- range $name, $secret := dict "keys" $values.secrets.keys "tls" $values.secrets.tls }}
{{- if $secret }}
{{- $volumes = append $volumes (dict "name" $name "secret" (dict "secretName" $secret)) }}
{{- $mounts = append $mounts (dict "name" $name "mountPath" (printf "/etc/tandem-%s" $name) "readOnly" true) }}
{{- end }}
{{- end }}
{{- if $values.secrets.tls }}
{{- $_ := set $container.readinessProbe.httpGet "scheme" "HTTPS" }}
{{- end }}
{{- $_ := set $container "env" (concat $env $values.env) }}
{{- if $volumes }}
{{- $_ := set .pod "volumes" $volumes }}
{{- $_ := set $container "volumeMounts" $mounts }}
{{- end }}
{{- $_ := mustMergeOverwrite .pod (deepCopy $values.pod) (deepCopy (.group.pod | default dict)) }}
{{- end -}}
