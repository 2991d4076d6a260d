//! HTTP requests and responses.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use zernel_serve::Expose;

use crate::client::{
    Response, connect_with_small_buffer, http_get, read_all, send_and_read_all, send_request,
};
use crate::fixture::{FakeSource, NEVER_EXPIRING_TIMEOUT, require_token, start_server};

const LOCALHOST_HEADER: &str = "Host: localhost\r\n";
const HEADERS_WITH_TOKEN: &str = "Host: localhost\r\nAuthorization: Bearer 0123456789abcdef\r\n";

pub(crate) async fn every_endpoint_in_the_index_answers() {
    let server = start_server(FakeSource::default(), |_| {});
    let index = http_get(server.http, "/").await;
    assert_eq!(index.status, 200);
    let paths: Vec<_> = index
        .body
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|word| word.starts_with('/'))
        .collect();
    assert_eq!(paths.len(), 6, "{paths:?}");
    for path in paths {
        let expected = if path == "/ws" { 400 } else { 200 };
        assert_eq!(http_get(server.http, path).await.status, expected, "{path}");
    }
}

pub(crate) async fn the_format_of_metrics_is_negotiated() {
    let server = start_server(FakeSource::default(), |_| {});
    let plain = http_get(server.http, "/metrics").await;
    assert_eq!(
        (plain.status, plain.body.as_str()),
        (200, "All Prometheus\n")
    );
    assert_eq!(
        plain.find_header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
    let headers = "Host: localhost\r\nAccept: application/openmetrics-text; version=1.0.0\r\n";
    let open = send_request(server.http, "GET /metrics", headers).await;
    assert_eq!(
        (open.status, open.body.as_str()),
        (200, "All OpenMetrics\n")
    );
    assert_eq!(
        open.find_header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    assert_eq!(open.find_header("vary"), Some("Accept"));
}

pub(crate) async fn quantiles_snapshot_and_ledger_are_served() {
    let server = start_server(FakeSource::default(), |_| {});
    let quantiles = http_get(server.http, "/metrics/quantiles").await;
    assert_eq!(quantiles.body, "All Quantiles\n");
    let snapshot = http_get(server.http, "/api/v1/snapshot").await;
    assert_eq!(
        snapshot.find_header("content-type"),
        Some("application/json")
    );
    assert_eq!(snapshot.find_header("cache-control"), Some("no-store"));
    let snapshot: Value = serde_json::from_str(&snapshot.body).unwrap();
    assert_eq!(snapshot["scope"], "All");
    let ledger = http_get(server.http, "/api/v1/ledger").await;
    let ledger: Value = serde_json::from_str(&ledger.body).unwrap();
    assert_eq!(ledger["ledger"], "All");
}

pub(crate) async fn head_returns_the_headers_of_get_without_a_body() {
    let server = start_server(FakeSource::default(), |_| {});
    let head = send_request(server.http, "HEAD /metrics", LOCALHOST_HEADER).await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    assert_eq!(head.find_header("content-length"), Some("15"));
}

pub(crate) async fn methods_other_than_get_and_head_are_refused() {
    let server = start_server(FakeSource::default(), |_| {});
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"] {
        let answer =
            send_request(server.http, &format!("{method} /metrics"), LOCALHOST_HEADER).await;
        assert_eq!(answer.status, 405, "{method}");
        assert_eq!(answer.find_header("allow"), Some("GET,HEAD"), "{method}");
    }
    let body = "Host: localhost\r\nContent-Length: 1000000000000\r\n";
    assert_eq!(
        send_request(server.http, "POST /metrics", body)
            .await
            .status,
        405
    );
}

pub(crate) async fn unknown_paths_get_a_hint() {
    let server = start_server(FakeSource::default(), |_| {});
    for address in [server.http, server.websocket] {
        for path in ["/metric", "/metrics/", "/../etc/passwd", "/%00", "/api"] {
            let answer = http_get(address, path).await;
            assert_eq!(answer.status, 404, "{path}");
            assert!(answer.body.contains("nothing here"), "{}", answer.body);
        }
    }
}

pub(crate) async fn health_lists_the_problems() {
    let healthy = start_server(FakeSource::default(), |_| {});
    let health = http_get(healthy.http, "/healthz").await;
    assert_eq!(health.status, 200);
    assert_eq!(
        health.body,
        json!({ "ok": true, "problems": [] }).to_string()
    );

    let unhealthy = FakeSource {
        problems: vec!["no probe is attached".into()],
        ..FakeSource::default()
    };
    let unhealthy = start_server(unhealthy, |_| {});
    let health = http_get(unhealthy.http, "/healthz").await;
    assert_eq!(health.status, 503);
    assert!(
        health.body.contains("no probe is attached"),
        "{}",
        health.body
    );
}

pub(crate) async fn foreign_hosts_and_origins_are_refused() {
    let server = start_server(FakeSource::default(), |options| {
        options.hosts = vec!["gpu7".into()];
    });
    for headers in [
        "Host: 127.0.0.1\r\n",
        "Host: [::1]:9091\r\n",
        "Host: gpu7:9091\r\n",
        "Host: localhost\r\nOrigin: http://127.0.0.1:3000\r\n",
    ] {
        assert_eq!(
            send_request(server.http, "GET /metrics", headers)
                .await
                .status,
            200,
            "{headers}"
        );
    }
    for (headers, why) in [
        ("", "Host"),
        ("Host: evil.example\r\n", "Host"),
        ("Host: localhost\r\nHost: evil.example\r\n", "Host"),
        (
            "Host: localhost\r\nOrigin: http://evil.example\r\n",
            "Origin",
        ),
        ("Host: localhost\r\nOrigin: null\r\n", "Origin"),
    ] {
        for path in ["/metrics", "/healthz", "/nowhere"] {
            let answer = send_request(server.http, &format!("GET {path}"), headers).await;
            assert_eq!(answer.status, 403, "{headers}");
            assert!(answer.body.contains(why), "{}", answer.body);
        }
    }
}

pub(crate) async fn requests_without_the_token_are_refused() {
    let unhealthy = FakeSource {
        problems: vec!["the disk of alice is full".into()],
        ..FakeSource::default()
    };
    let server = start_server(unhealthy, require_token);
    let without = http_get(server.http, "/metrics").await;
    assert_eq!(without.status, 401);
    assert!(
        without
            .find_header("www-authenticate")
            .unwrap()
            .starts_with("Bearer")
    );
    for path in [
        "/",
        "/metrics",
        "/metrics/quantiles",
        "/metrics?token=0123456789abcdef",
        "/api/v1/snapshot",
        "/api/v1/ledger",
        "/ws",
        "/nowhere",
    ] {
        assert_eq!(http_get(server.http, path).await.status, 401, "{path}");
    }
    assert_eq!(
        send_request(server.http, "GET /metrics", HEADERS_WITH_TOKEN)
            .await
            .status,
        200
    );
    let health = http_get(server.http, "/healthz").await;
    assert_eq!(
        (health.status, health.body.as_str()),
        (503, "{\"ok\":false,\"problem_count\":1}")
    );
    let health = send_request(server.http, "GET /healthz", HEADERS_WITH_TOKEN).await;
    assert!(health.body.contains("alice"), "{}", health.body);
}

pub(crate) async fn aggregates_are_served_without_the_token() {
    let server = start_server(FakeSource::default(), |options| {
        require_token(options);
        options.expose = Expose::Aggregate;
    });
    for (headers, scope) in [(LOCALHOST_HEADER, "Machine"), (HEADERS_WITH_TOKEN, "All")] {
        let metrics = send_request(server.http, "GET /metrics", headers).await;
        assert_eq!(metrics.body, format!("{scope} Prometheus\n"));
        for (path, key) in [("/api/v1/snapshot", "scope"), ("/api/v1/ledger", "ledger")] {
            let answer = send_request(server.http, &format!("GET {path}"), headers).await;
            let answer: Value = serde_json::from_str(&answer.body).unwrap();
            assert_eq!(answer[key], scope, "{path}");
        }
    }
}

pub(crate) async fn malformed_requests_get_400_and_the_server_keeps_serving() {
    let server = start_server(FakeSource::default(), |_| {});
    let binary: Vec<u8> = (0..=255).collect();
    let tls_hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n";
    for bytes in [
        binary.as_slice(),
        tls_hello,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: local\0host\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5, 6\r\n\r\n",
    ] {
        let stream = TcpStream::connect(server.http).await.unwrap();
        let answer = send_and_read_all(stream, bytes).await;
        if !answer.is_empty() {
            assert_eq!(Response::parse(&answer).status, 400, "{bytes:?}");
        }
    }
    assert_eq!(http_get(server.http, "/metrics").await.status, 200);
}

pub(crate) async fn too_many_or_too_long_headers_end_the_connection() {
    let server = start_server(FakeSource::default(), |_| {});
    let many: String = (0..1000).map(|n| format!("X-{n}: y\r\n")).collect();
    let many = send_request(server.http, "GET /", &format!("{LOCALHOST_HEADER}{many}")).await;
    assert_eq!(many.status, 431);
    // The head of the request never ends, so the server must stop reading at its limit.
    for start in ["GET /", "GET / HTTP/1.1\r\nHost: localhost\r\nX: "] {
        let mut stream = TcpStream::connect(server.http).await.unwrap();
        stream.write_all(start.as_bytes()).await.unwrap();
        let mut sent = 0;
        while stream.write_all(&[b'a'; 1024]).await.is_ok() && sent < 64 << 20 {
            sent += 1024;
        }
        assert!(
            sent < 64 << 20,
            "the server read everything after {start:?}"
        );
    }
    assert_eq!(http_get(server.http, "/metrics").await.status, 200);
}

pub(crate) async fn a_client_that_never_finishes_its_request_is_disconnected() {
    let server = start_server(FakeSource::default(), |options| {
        options.limits.request_head_timeout = Duration::from_millis(50);
    });
    let whole = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for begun in ["", "GET / HTTP/1.1\r\nHost: localh", whole] {
        let mut stream = TcpStream::connect(server.http).await.unwrap();
        stream.write_all(begun.as_bytes()).await.unwrap();
        // Reading ends only when the server closes the connection.
        read_all(&mut stream).await;
    }
}

pub(crate) async fn a_client_that_never_reads_its_response_is_disconnected() {
    let long = FakeSource {
        padding: 32 << 20,
        ..FakeSource::default()
    };
    let server = start_server(long, |options| {
        options.limits.write_stall_timeout = Duration::from_millis(50);
        options.limits.shutdown_grace = NEVER_EXPIRING_TIMEOUT;
    });
    let mut stream = connect_with_small_buffer(server.http).await;
    let request = b"GET /api/v1/ledger HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(request).await.unwrap();
    stream.readable().await.unwrap();
    // The server waits for the response in flight, so it stops only after it has disconnected the
    // client.
    server.shut_down().await;
    let received = read_all(&mut stream).await;
    assert!(received.len() < 32 << 20, "{}", received.len());
}

pub(crate) async fn a_panic_in_the_source_is_status_500() {
    let source = FakeSource::default();
    source.panics.store(true, Ordering::SeqCst);
    let broken = source.panics.clone();
    let server = start_server(source, |_| {});
    assert_eq!(http_get(server.http, "/api/v1/ledger").await.status, 500);
    assert_eq!(http_get(server.http, "/metrics").await.status, 200);
    broken.store(false, Ordering::SeqCst);
    assert_eq!(http_get(server.http, "/api/v1/ledger").await.status, 200);
}
