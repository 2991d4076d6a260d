use super::*;

fn example_metrics() -> AggregatedMetrics {
    let mut metrics = AggregatedMetrics::default();
    metrics.record_gpu_mem(1234, 0, 1 << 30, 2 << 30);
    for us in 1..=100 {
        metrics.record_cuda_latency(1234, us * 1_000);
        metrics.record_cuda_latency(99, us * 100_000);
    }
    metrics.record_nccl("AllReduce", 3_000_000);
    metrics.record_nccl("Broadcast", 9_000_000);
    metrics.record_dataloader_wait(1234, 20_000_000);
    metrics.record_dist_sync(1234, 5_000_000);
    metrics
}

#[test]
fn the_memory_peak_never_falls() {
    let mut metrics = AggregatedMetrics::default();
    metrics.record_gpu_mem(1, 0, 100, 150);
    metrics.record_gpu_mem(1, 0, 40, 90);
    metrics.record_gpu_mem(1, 0, 400, 0);
    metrics.record_gpu_mem(1, 1, 7, 7);
    assert_eq!(
        metrics.gpu_memory["1:0"],
        GpuMemMetrics {
            current_bytes: 400,
            peak_bytes: 400,
            alloc_count: 2,
            free_count: 1
        }
    );
    assert_eq!(metrics.gpu_memory["1:1"].peak_bytes, 7);
}

#[test]
fn every_family_is_exposed_with_buckets_sum_and_count() {
    let text = example_metrics().to_prometheus();
    for line in [
        r#"zernel_gpu_memory_used_bytes{pid="1234",gpu_id="0"} 1073741824"#,
        r#"zernel_gpu_memory_peak_bytes{pid="1234",gpu_id="0"} 2147483648"#,
        r#"zernel_cuda_launch_latency_seconds_bucket{pid="1234",le="0.000001023"} 1"#,
        r#"zernel_cuda_launch_latency_seconds_bucket{pid="1234",le="0.000016383"} 16"#,
        r#"zernel_cuda_launch_latency_seconds_bucket{pid="1234",le="+Inf"} 100"#,
        r#"zernel_cuda_launch_latency_seconds_sum{pid="1234"} 0.00505"#,
        r#"zernel_cuda_launch_latency_seconds_count{pid="1234"} 100"#,
        r#"zernel_nccl_collective_duration_seconds_count{op="AllReduce"} 1"#,
        r#"zernel_dataloader_wait_seconds_sum{pid="1234"} 0.02"#,
        r#"zernel_dist_sync_seconds_count{pid="1234"} 1"#,
    ] {
        assert!(
            text.lines().any(|found| found == line),
            "{line}\nnot in\n{text}"
        );
    }
    assert!(!text.contains("quantile"));
}

#[test]
fn the_quantile_format_has_quantiles_instead_of_buckets() {
    let text = example_metrics().to_prometheus_quantiles();
    for start in [
        r#"zernel_cuda_launch_latency_seconds{pid="99",quantile="0.5"} 0.00"#,
        r#"zernel_cuda_launch_latency_seconds{pid="1234",quantile="0.99"} 0.0001"#,
        r#"zernel_nccl_collective_duration_seconds{op="Broadcast",quantile="0.5"} 0.009"#,
        r#"zernel_dist_sync_seconds_sum{pid="1234"} 0.005"#,
    ] {
        assert!(
            text.lines().any(|line| line.starts_with(start)),
            "{start}\nnot in\n{text}"
        );
    }
    assert!(!text.contains("_bucket"));
}

#[test]
fn a_snapshot_merges_pids_and_keeps_per_pid_details() {
    let snapshot = example_metrics().to_ws_snapshot();
    assert_eq!(
        snapshot["gpu_utilization"],
        json!([{"key": "1234:0", "current_bytes": 1_u64 << 30, "peak_bytes": 2_u64 << 30}])
    );
    let near = |name: &str, exact: f64| {
        let value = snapshot[name].as_f64().unwrap();
        let error = (value - exact).abs() / exact;
        assert!(
            error <= LatencyHistogram::MAX_QUANTILE_ERROR,
            "{name} is {value}, not {exact}"
        );
    };
    // The lower half is the 100 launches of pid 1234 and the shortest of pid 99.
    near("cuda_latency_p50_us", 100.0);
    near("cuda_latency_p99_us", 9_800.0);
    near("nccl_allreduce_p50_ms", 3.0);
    near("nccl_allreduce_p99_ms", 3.0);
    near("dataloader_wait_p50_ms", 20.0);
    assert!(snapshot["last_update_ms"].as_u64().unwrap() > 1_700_000_000_000);
    assert_eq!(snapshot["processes"]["99"]["cuda_latency"]["count"], 100);
    assert_eq!(snapshot["nccl"]["Broadcast"]["max_ns"], 9_000_000);
}

#[test]
fn an_empty_snapshot_has_null_scalars() {
    let snapshot = AggregatedMetrics::default().to_ws_snapshot();
    assert_eq!(snapshot["gpu_utilization"], json!([]));
    assert_eq!(snapshot["cuda_latency_p50_us"], Value::Null);
    assert_eq!(snapshot["last_update_ms"], 0);
}

#[test]
fn all_spellings_of_all_reduce_are_recognised() {
    for op in ["AllReduce", "allreduce", "ncclAllReduce"] {
        assert!(is_all_reduce(op), "{op}");
    }
    for op in ["AllReduceScatter", "Reduce", ""] {
        assert!(!is_all_reduce(op), "{op}");
    }
}

#[test]
fn metrics_serialise_with_their_histograms() {
    let value = serde_json::to_value(example_metrics()).unwrap();
    assert_eq!(value["cuda_latency"]["1234"]["count"], 100);
    assert_eq!(value["gpu_memory"]["1234:0"]["alloc_count"], 1);
}

#[test]
fn remove_process_removes_all_its_metrics() {
    let mut metrics = example_metrics();
    metrics.record_gpu_mem(123, 0, 1, 1);
    metrics.remove_process(1234);
    assert!(!metrics.to_prometheus().contains("\"1234\""));
    assert_eq!(
        metrics.gpu_memory.len(),
        1,
        "a pid with the same prefix stays"
    );
    assert_eq!(metrics.cuda_latency.len(), 1);
}
