{{/* Names do not depend on the release: definitions and permissions are cluster-scoped, so a Kubernetes cluster has one release. */}}

{{- define "reprise.labels" -}}
app.kubernetes.io/name: reprise
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Labels of the operator's pods, different from those by which the operator selects agents and members. */}}
{{- define "reprise.operatorSelector" -}}
app.kubernetes.io/name: reprise-operator
app.kubernetes.io/component: operator
{{- end }}

{{- define "reprise.serviceAccount" -}}
{{ .Values.serviceAccount.name | default "reprise-operator" }}
{{- end }}

{{/* Complete name of an image: list of context and the image's key. */}}
{{- define "reprise.image" -}}
{{- $context := index . 0 -}}
{{- $image := index $context.Values.images (index . 1) -}}
{{- $name := $image.repository -}}
{{- with $context.Values.images.registry -}}{{- $name = printf "%s/%s" . $name -}}{{- end -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $name $image.digest }}
{{- else -}}
{{ printf "%s:%s" $name ($image.tag | default $context.Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{/* "true" if an optional object is rendered: list of context, value (Auto, Always, Never) and API. */}}
{{- define "reprise.when" -}}
{{- $context := index . 0 -}}
{{- $value := index . 1 -}}
{{- if or (eq $value "Always") (and (eq $value "Auto") ($context.Capabilities.APIVersions.Has (index . 2))) -}}true{{- end -}}
{{- end }}

{{/* Pod security context for the level `restricted`. */}}
{{- define "reprise.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "reprise.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "reprise.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Scheduling of pods: a map with nodeSelector and tolerations. */}}
{{- define "reprise.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Pod of a hook's Job, without arguments: list of context and name, which is also the name of its service account. */}}
{{- define "reprise.hookPod" -}}
{{- $context := index . 0 -}}
restartPolicy: Never
serviceAccountName: {{ index . 1 }}
automountServiceAccountToken: true
{{- with include "reprise.pullSecrets" $context | trim }}{{ . | nindent 0 }}{{ end }}
securityContext: {{- include "reprise.podSecurity" $context | nindent 2 }}
{{- with include "reprise.placement" $context.Values.hooks | trim }}{{ . | nindent 0 }}{{ end }}
containers:
  - name: operator
    image: {{ include "reprise.image" (list $context "operator") }}
    imagePullPolicy: {{ $context.Values.images.pullPolicy }}
    securityContext: {{- include "reprise.containerSecurity" $context | nindent 6 }}
    resources:
      requests:
        cpu: 50m
        memory: 64Mi
      limits:
        memory: 128Mi
{{- end }}
