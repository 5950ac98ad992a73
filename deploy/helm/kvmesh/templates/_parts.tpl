{{- /* Parts of pods. Only functions of text/template and sprig, and toYaml: no include. */ -}}

{{- /* Name of the Secret with the mesh's secret and the password of the chart's own Redis. */ -}}
{{- define "kvmesh.meshSecret" }}{{ .root.Values.mesh.secret | default (printf "%s-mesh" .root.Release.Name) }}{{ end }}

{{- define "kvmesh.labels" }}
    app.kubernetes.io/name: kvmesh
    app.kubernetes.io/instance: {{ .root.Release.Name }}
    app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "kvmesh.selector" }}
      app.kubernetes.io/name: kvmesh
      app.kubernetes.io/instance: {{ .root.Release.Name }}
      app.kubernetes.io/component: {{ .name }}
      {{- if hasKey . "deployment" }}
      kvmesh/deployment: {{ .deployment }}
      {{- end }}
{{- end }}

{{- define "kvmesh.podLabels" }}
        app.kubernetes.io/name: kvmesh
        app.kubernetes.io/instance: {{ .root.Release.Name }}
        app.kubernetes.io/component: {{ .name }}
        {{- if hasKey . "deployment" }}
        kvmesh/deployment: {{ .deployment }}
        {{- end }}
      annotations:
        prometheus.io/scrape: "true"
        prometheus.io/port: "9100"
{{- end }}

{{- define "kvmesh.podSecurity" }}
      automountServiceAccountToken: {{ hasKey . "account" }}
      {{- if hasKey . "account" }}
      serviceAccountName: {{ .account }}
      {{- end }}
      enableServiceLinks: false
      # SIGTERM is the drain: nothing new is taken, what runs is finished.
      terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 10 }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        # Checkpoints are large: owners are changed only where they are wrong.
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: { type: RuntimeDefault }
      {{- with .root.Values.image.pullSecrets }}
      imagePullSecrets:
        {{- toYaml . | trim | nindent 8 }}
      {{- end }}
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
          image: "{{ .root.Values.image.registry }}kvmesh-{{ index . "image" | default (ternary "decode" .name (eq .name "spare")) }}{{ if and (eq .root.Values.engine.kind "vllm") (or (hasKey . "image") (has .name (list "prefill" "decode" "spare"))) }}-vllm{{ end }}:{{ .root.Values.image.tag }}"
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
            exec: &{{ .name }}-health
              command: [python, -m, kvmesh.cli, health, "localhost:7000", --tls-ca, /etc/kvmesh/tls/ca.crt,
                --tls-cert, /etc/kvmesh/tls/tls.crt, --tls-key, /etc/kvmesh/tls/tls.key]
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 120
          readinessProbe:
            exec: *{{ .name }}-health
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

{{- /* Options of a service as variables: the chart's own in `own`, over them those of the values' `env`.
       Each name once, since a server-side apply refuses a name that is there twice. */ -}}
{{- define "kvmesh.env" }}
{{- $release := .root.Release.Name }}
{{- $env := dict "KVMESH_SERVER__HOST" "0.0.0.0" "KVMESH_SERVER__PORT" "7000" }}
{{- $_ := set $env "KVMESH_SERVER__SECRET_FILE" "/etc/kvmesh/mesh/secret" }}
{{- $_ := set $env "KVMESH_SERVER__DRAIN_S" .root.Values.drainSeconds }}
{{- $_ := set $env "KVMESH_TELEMETRY__METRICS_PORT" "9100" }}
{{- /* gRPC's own lines, one per failed handshake, are no JSON, and strangers could fill a disk. */}}
{{- $_ := set $env "GRPC_VERBOSITY" "ERROR" }}
{{- if not (or (eq .name "gateway") (hasKey . "image")) }}
{{- $_ := set $env "KVMESH_SERVER__DIRECT_PORT" "7002" }}
{{- end }}
{{- if .root.Values.tracing.collector }}
{{- $_ := set $env "KVMESH_TELEMETRY__TRACE__EXPORTER" "otlp" }}
{{- $_ := set $env "KVMESH_TELEMETRY__TRACE__TARGET" .root.Values.tracing.collector }}
{{- end }}
{{- if .root.Values.tls.secret }}
{{- $launched := .root.Values.launcher.enabled }}
{{- range $part := ternary (list "SERVER" (ternary "RANKS" "DATA" (hasKey . "image"))) (list "SERVER") (or (hasKey . "image") (has .name (list "prefill" "decode" "spare"))) }}
{{- $_ := set $env (printf "KVMESH_%s__TLS__CERT" $part) "/etc/kvmesh/tls/tls.crt" }}
{{- $_ := set $env (printf "KVMESH_%s__TLS__KEY" $part) "/etc/kvmesh/tls/tls.key" }}
{{- $_ := set $env (printf "KVMESH_%s__TLS__CA" $part) "/etc/kvmesh/tls/ca.crt" }}
{{- if $launched }}{{- /* Workers are pods of Deployments, and no certificate names their addresses. */}}
{{- $_ := set $env (printf "KVMESH_%s__TLS__PEER_NAME" $part) (printf "%s-mesh" $release) }}
{{- end }}
{{- end }}
{{- end }}
{{- if .root.Values.admin.secret }}
{{- $_ := set $env "KVMESH_SERVER__ADMIN__HOST" "0.0.0.0" }}
{{- $_ := set $env "KVMESH_SERVER__ADMIN__PORT" "7100" }}
{{- $_ := set $env "KVMESH_SERVER__ADMIN__TOKEN_FILE" "/etc/kvmesh/admin/token" }}
{{- end }}
{{- if has .name (list "gateway" "scheduler" "kvmanager") }}
{{- $_ := set $env "KVMESH_REDIS__URL" (ternary (printf "redis://%s-redis:6379/0" $release) .root.Values.redis.url .root.Values.redis.enabled) }}
{{- end }}
{{- $schedulers := list }}
{{- range $i := until (int .root.Values.scheduler.replicas) }}
{{- $schedulers = append $schedulers (printf "%s-scheduler-%d.%s-scheduler:7000" $release $i $release) }}
{{- end }}
{{- range $name := .targets }}
{{- $_ := set $env $name (join "," $schedulers) }}
{{- end }}
{{- range $name, $value := merge (dict) .spec.env .own $env }}
            - { name: {{ $name }}, value: {{ template "kvmesh.text" $value }} }
{{- end }}
{{- if has .name (list "gateway" "scheduler" "kvmanager") }}
{{- if .root.Values.redis.secret }}
            - name: KVMESH_REDIS__PASSWORD
              valueFrom: { secretKeyRef: { name: {{ .root.Values.redis.secret }}, key: password } }
{{- else if .root.Values.redis.enabled }}
            - name: KVMESH_REDIS__PASSWORD
              valueFrom: { secretKeyRef: { name: {{ template "kvmesh.meshSecret" . }}, key: redis-password } }
{{- end }}
{{- end }}
{{- end }}

{{- /* A value as a string. Numbers of values.yaml are floating point: a million would be 1e+06. */ -}}
{{- define "kvmesh.text" }}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . | quote }}{{ else }}{{ toString . | quote }}{{ end }}
{{- end }}

{{- define "kvmesh.mounts" }}
          volumeMounts:
            - { name: tmp, mountPath: /tmp }
            - { name: mesh, mountPath: /etc/kvmesh/mesh, readOnly: true }
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
            {{- if hasKey . "ranks" }}
            - { name: shm, mountPath: /dev/shm }
            {{- end }}
{{- end }}

{{- define "kvmesh.volumes" }}
      volumes:
        # Sockets and little else: who fills it is stopped, not the node.
        - { name: tmp, emptyDir: { sizeLimit: 256Mi } }
        - name: mesh
          secret:
            secretName: {{ template "kvmesh.meshSecret" . }}
            defaultMode: 0440
            items: [{ key: secret, path: secret }]
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
        {{- if hasKey . "ranks" }}
        # vLLM's ranks exchange values here, 4 MiB per rank and thread; pods have 64 MiB by default.
        - { name: shm, emptyDir: { medium: Memory } }
        {{- end }}
{{- end }}

{{- define "kvmesh.ports" }}
            - { name: grpc, containerPort: 7000 }
            {{- if not (or (eq .name "gateway") (hasKey . "image")) }}
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
  scaleTargetRef: { apiVersion: {{ ternary "leaderworkerset.x-k8s.io" "apps" (eq .kind "LeaderWorkerSet") }}/v1, kind: {{ .kind }}, name: {{ .root.Release.Name }}-{{ .name }} }
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

{{- /* A worker's pod, and that of its ranks on another host. */ -}}
{{- define "kvmesh.workerPod" }}
    metadata:
      labels:
        {{- template "kvmesh.podLabels" . }}
    spec:
      {{- template "kvmesh.podSecurity" . }}
      {{- template "kvmesh.placement" . }}
      containers:
        {{- template "kvmesh.containerStart" . }}
          ports:
            - { name: data, containerPort: 7001 }
            {{- template "kvmesh.ports" . }}
          env:
            # First, because the values below refer to it.
            - { name: POD_NAME, valueFrom: { fieldRef: { fieldPath: metadata.name } } }
            {{- if .launched }}
            - { name: POD_IP, valueFrom: { fieldRef: { fieldPath: status.podIP } } }
            {{- end }}
            {{- template "kvmesh.env" . }}
          {{- template "kvmesh.resources" . }}
          {{- template "kvmesh.probes" . }}
          {{- template "kvmesh.mounts" . }}
      {{- template "kvmesh.volumes" . }}
{{- end }}

{{- define "kvmesh.ranksPod" }}
    metadata:
      labels:
        {{- template "kvmesh.podLabels" . }}
    spec:
      {{- template "kvmesh.podSecurity" . }}
      {{- template "kvmesh.placement" . }}
      containers:
        {{- template "kvmesh.containerStart" . }}
          ports:
            {{- template "kvmesh.ports" . }}
          env:
            # First, because the values below refer to them.
            - { name: LEADER_NAME, valueFrom: { fieldRef: { fieldPath: "metadata.annotations['leaderworkerset.sigs.k8s.io/leader-name']" } } }
            - { name: HOST_INDEX, valueFrom: { fieldRef: { fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']" } } }
            {{- template "kvmesh.env" . }}
          {{- template "kvmesh.resources" . }}
          {{- template "kvmesh.probes" . }}
          {{- template "kvmesh.mounts" . }}
      {{- template "kvmesh.volumes" . }}
{{- end }}

{{- define "kvmesh.placement" }}
      {{- with .spec.nodeSelector }}
      nodeSelector:
        {{- toYaml . | trim | nindent 8 }}
      {{- end }}
      {{- with .spec.tolerations }}
      tolerations:
        {{- toYaml . | trim | nindent 8 }}
      {{- end }}
{{- end }}

{{- define "kvmesh.resources" }}
          resources:
            requests:
              {{- toYaml .spec.resources.requests | trim | nindent 14 }}
            limits:
              {{- toYaml .spec.resources.limits | trim | nindent 14 }}
              {{- if .spec.gpus }}
              nvidia.com/gpu: {{ .spec.gpus }}
              {{- end }}
{{- end }}
