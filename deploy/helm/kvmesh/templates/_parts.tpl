{{- /* Parts of pods. Only functions of text/template and sprig, and toYaml: no include. */ -}}

{{- define "kvmesh.labels" }}
    app.kubernetes.io/name: kvmesh
    app.kubernetes.io/instance: {{ .root.Release.Name }}
    app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "kvmesh.selector" }}
      app.kubernetes.io/name: kvmesh
      app.kubernetes.io/instance: {{ .root.Release.Name }}
      app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "kvmesh.podLabels" }}
        app.kubernetes.io/name: kvmesh
        app.kubernetes.io/instance: {{ .root.Release.Name }}
        app.kubernetes.io/component: {{ .name }}
      annotations:
        prometheus.io/scrape: "true"
        prometheus.io/port: "9100"
{{- end }}

{{- define "kvmesh.podSecurity" }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      # SIGTERM is the drain: nothing new is taken, what runs is finished.
      terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 10 }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        seccompProfile: { type: RuntimeDefault }
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              app.kubernetes.io/instance: {{ .root.Release.Name }}
              app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "kvmesh.containerStart" }}
        - name: {{ .name }}
          image: "{{ .root.Values.image.registry }}kvmesh-{{ .name }}:{{ .root.Values.image.tag }}"
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: { drop: [ALL] }
{{- end }}

{{- define "kvmesh.probes" }}
          {{- if .root.Values.tls.secret }}
          {{- /* The kubelet's own gRPC probe speaks plain text only. */}}
          startupProbe:
            exec: &health
              command: [python, -m, kvmesh.cli, health, "localhost:7000", --tls-ca, /etc/kvmesh/tls/ca.crt,
                --tls-cert, /etc/kvmesh/tls/tls.crt, --tls-key, /etc/kvmesh/tls/tls.key]
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 120
          readinessProbe:
            exec: *health
            periodSeconds: 5
            timeoutSeconds: 5
          {{- else }}
          startupProbe:
            grpc: { port: 7000 }
            periodSeconds: 2
            # Loading a large checkpoint takes its time.
            failureThreshold: 300
          readinessProbe:
            grpc: { port: 7000 }
            periodSeconds: 5
          {{- end }}
          # Not the health service: it says NOT_SERVING during a drain, which is no reason to kill.
          livenessProbe:
            tcpSocket: { port: grpc }
            periodSeconds: 10
            failureThreshold: 6
{{- end }}

{{- define "kvmesh.env" }}
            - { name: KVMESH_SERVER__HOST, value: 0.0.0.0 }
            - { name: KVMESH_SERVER__PORT, value: "7000" }
            {{- if ne .name "gateway" }}
            - { name: KVMESH_SERVER__DIRECT_PORT, value: "7002" }
            {{- end }}
            - { name: KVMESH_SERVER__DRAIN_S, value: "{{ .root.Values.drainSeconds }}" }
            - { name: KVMESH_TELEMETRY__METRICS_PORT, value: "9100" }
            {{- if .root.Values.tracing.collector }}
            - { name: KVMESH_TELEMETRY__TRACE__EXPORTER, value: otlp }
            - { name: KVMESH_TELEMETRY__TRACE__TARGET, value: "{{ .root.Values.tracing.collector }}" }
            {{- end }}
            {{- if .root.Values.tls.secret }}
            - { name: KVMESH_SERVER__TLS__CERT, value: /etc/kvmesh/tls/tls.crt }
            - { name: KVMESH_SERVER__TLS__KEY, value: /etc/kvmesh/tls/tls.key }
            - { name: KVMESH_SERVER__TLS__CA, value: /etc/kvmesh/tls/ca.crt }
            {{- end }}
            {{- if .root.Values.admin.secret }}
            - { name: KVMESH_SERVER__ADMIN__HOST, value: 0.0.0.0 }
            - { name: KVMESH_SERVER__ADMIN__PORT, value: "7100" }
            - { name: KVMESH_SERVER__ADMIN__TOKEN_FILE, value: /etc/kvmesh/admin/token }
            {{- end }}
            {{- range $name, $value := .spec.env }}
            - { name: {{ $name }}, value: {{ $value | toString | quote }} }
            {{- end }}
{{- end }}

{{- define "kvmesh.redisEnv" }}
            - name: KVMESH_REDIS__URL
              value: "{{ if .root.Values.redis.enabled }}redis://{{ .root.Release.Name }}-redis:6379/0{{ else }}{{ .root.Values.redis.url }}{{ end }}"
            {{- if .root.Values.redis.secret }}
            - name: KVMESH_REDIS__PASSWORD
              valueFrom: { secretKeyRef: { name: {{ .root.Values.redis.secret }}, key: password } }
            {{- end }}
{{- end }}

{{- define "kvmesh.schedulers" -}}
{{- range $i := until (int .root.Values.scheduler.replicas) }}{{ if $i }},{{ end }}{{ $.root.Release.Name }}-scheduler-{{ $i }}.{{ $.root.Release.Name }}-scheduler:7000{{ end }}
{{- end }}

{{- define "kvmesh.mounts" }}
          volumeMounts:
            - { name: tmp, mountPath: /tmp }
            {{- if .root.Values.tls.secret }}
            - { name: tls, mountPath: /etc/kvmesh/tls, readOnly: true }
            {{- end }}
            {{- if .root.Values.admin.secret }}
            - { name: admin, mountPath: /etc/kvmesh/admin, readOnly: true }
            {{- end }}
            {{- if .keys }}
            - { name: keys, mountPath: /etc/kvmesh/keys, readOnly: true }
            {{- end }}
            {{- if .tenants }}
            - { name: tenants, mountPath: /etc/kvmesh/tenants, readOnly: true }
            {{- end }}
            {{- if .model }}
            - { name: models, mountPath: /models, readOnly: true }
            {{- end }}
{{- end }}

{{- define "kvmesh.volumes" }}
      volumes:
        - { name: tmp, emptyDir: {} }
        {{- if .root.Values.tls.secret }}
        - { name: tls, secret: { secretName: {{ .root.Values.tls.secret }}, defaultMode: 0440 } }
        {{- end }}
        {{- if .root.Values.admin.secret }}
        - { name: admin, secret: { secretName: {{ .root.Values.admin.secret }}, defaultMode: 0440 } }
        {{- end }}
        {{- if .keys }}
        - { name: keys, secret: { secretName: {{ .keys }}, defaultMode: 0440 } }
        {{- end }}
        {{- if .tenants }}
        - { name: tenants, secret: { secretName: {{ .tenants }}, defaultMode: 0440 } }
        {{- end }}
        {{- if .model }}
        - { name: models, persistentVolumeClaim: { claimName: {{ .model }}, readOnly: true } }
        {{- end }}
{{- end }}

{{- define "kvmesh.ports" }}
            - { name: grpc, containerPort: 7000 }
            {{- if ne .name "gateway" }}
            - { name: direct, containerPort: 7002 }
            {{- end }}
            - { name: metrics, containerPort: 9100 }
            {{- if .root.Values.admin.secret }}
            - { name: admin, containerPort: 7100 }
            {{- end }}
{{- end }}

{{- define "kvmesh.budget" }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .root.Release.Name }}-{{ .name }}
  labels:
    {{- template "kvmesh.labels" . }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- template "kvmesh.selector" . }}
{{- end }}

{{- define "kvmesh.autoscaler" }}
{{- if .spec.autoscaling.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .root.Release.Name }}-{{ .name }}
  labels:
    {{- template "kvmesh.labels" . }}
spec:
  scaleTargetRef: { apiVersion: apps/v1, kind: {{ .kind }}, name: {{ .root.Release.Name }}-{{ .name }} }
  minReplicas: {{ .spec.autoscaling.min }}
  maxReplicas: {{ .spec.autoscaling.max }}
  metrics:
    - type: Pods
      pods:
        metric: { name: {{ .spec.autoscaling.metric }} }
        target: { type: AverageValue, averageValue: {{ .spec.autoscaling.target | quote }} }
  behavior:
    scaleUp: { stabilizationWindowSeconds: 0, policies: [{ type: Pods, value: 2, periodSeconds: 30 }] }
    # One at a time: each drains, and its cache is lost with it.
    scaleDown: { stabilizationWindowSeconds: 300, policies: [{ type: Pods, value: 1, periodSeconds: 60 }] }
{{- end }}
{{- end }}
