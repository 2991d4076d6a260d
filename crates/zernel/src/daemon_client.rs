//! Client of the daemon: requests snapshots over its unix socket.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Deserialize;
use zernel_model::snapshot::{
    SNAPSHOT_FORMAT, Snapshot, ZERNEL_VERSION, is_snapshot_late, late_snapshot_problem,
};

/// Longest wait for the daemon.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest response that is read. Snapshots are smaller.
const MAX_RESPONSE_BYTES: u64 = 256 << 20;

/// The daemon's socket.
#[derive(Debug, Clone, Args)]
pub(crate) struct DaemonSocket {
    /// Socket of `zernel observe`
    #[arg(long, value_name = "PATH", default_value = "/run/zernel/observe.sock")]
    socket: PathBuf,
}

/// Why no snapshot was received from the daemon.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// The observer has not published for a while.
    #[error("{0}; the daemon's log or `/healthz` may say why")]
    Late(String),
    /// No process listens on the socket.
    #[error("no daemon listens on {}; start one with `sudo zernel observe`, or give its socket with --socket", .0.display())]
    NoDaemon(PathBuf),
    /// The socket does not work.
    #[error("cannot read from the daemon on {}: {source}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The daemon refused the request.
    #[error("the daemon refused the request: {0}")]
    Refused(String),
    /// The daemon writes snapshots that this program would misread.
    #[error(
        "the daemon on {} is {daemon}, this program is zernel {ZERNEL_VERSION}, and their snapshots differ; use the same version for both",
        path.display()
    )]
    OtherVersion {
        /// The socket.
        path: PathBuf,
        /// The version of the daemon.
        daemon: String,
    },
    /// The response is not a snapshot.
    #[error("{} is not a socket of this version of `zernel observe`: {problem}", path.display())]
    InvalidResponse {
        /// The socket.
        path: PathBuf,
        /// What is wrong with the response.
        problem: String,
    },
}

impl DaemonSocket {
    /// The current state. A daemon whose observer is late is an error: its figures no longer describe the processes.
    pub(crate) fn fresh_snapshot(&self) -> Result<Snapshot, ClientError> {
        let snapshot = self.latest_snapshot()?;
        let age = Duration::try_from_secs_f64(snapshot.age_seconds).unwrap_or_default();
        match is_snapshot_late(age) {
            true => Err(ClientError::Late(late_snapshot_problem(age))),
            false => Ok(snapshot),
        }
    }

    /// The newest snapshot of the daemon: all of it for root, own processes for other users.
    pub(crate) fn latest_snapshot(&self) -> Result<Snapshot, ClientError> {
        let path = || self.socket.clone();
        let response = request_snapshot(&self.socket).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                ClientError::NoDaemon(path())
            }
            _ => ClientError::Socket {
                path: path(),
                source,
            },
        })?;
        let invalid = |problem: String| ClientError::InvalidResponse {
            path: path(),
            problem,
        };
        let (status, body) =
            parse_response(&response).map_err(|problem| invalid(problem.to_owned()))?;
        if status != 200 {
            let text = String::from_utf8_lossy(body);
            let refused = format!("{status} {}", zernel_report::text::shorten_text(&text, 200));
            return Err(ClientError::Refused(refused));
        }
        let parse_error = |error: serde_json::Error| invalid(error.to_string());
        // A snapshot of this format usually begins with the format's number. Then the body is parsed once, not twice.
        if !body.starts_with(format!("{{\"format\":{SNAPSHOT_FORMAT},").as_bytes()) {
            let header: SnapshotHeader = serde_json::from_slice(body).map_err(parse_error)?;
            if header.format != SNAPSHOT_FORMAT {
                return Err(ClientError::OtherVersion {
                    path: path(),
                    daemon: header.daemon_name_and_version(),
                });
            }
        }
        serde_json::from_slice(body).map_err(parse_error)
    }
}

/// The keys that every version of a snapshot has. Daemons before 0.2.0 have no format.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SnapshotHeader {
    format: u32,
    zernel_version: String,
}

impl SnapshotHeader {
    /// The program that wrote the snapshot.
    fn daemon_name_and_version(&self) -> String {
        match self.zernel_version.as_str() {
            "" => "older than zernel 0.2.0".to_owned(),
            version => format!("zernel {}", zernel_report::text::shorten_text(version, 40)),
        }
    }
}

fn request_snapshot(socket: &Path) -> io::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(DAEMON_TIMEOUT))?;
    stream.set_write_timeout(Some(DAEMON_TIMEOUT))?;
    // In HTTP/1.0 a response ends with the connection and has no chunks.
    stream.write_all(b"GET /api/v1/snapshot HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut response = Vec::new();
    stream.take(MAX_RESPONSE_BYTES).read_to_end(&mut response)?;
    Ok(response)
}

/// The status and the body of a response.
fn parse_response(response: &[u8]) -> Result<(u16, &[u8]), &'static str> {
    const END_OF_HEAD: &[u8] = b"\r\n\r\n";
    let head = response
        .windows(END_OF_HEAD.len())
        .position(|bytes| bytes == END_OF_HEAD);
    let (head, body) = response.split_at(head.ok_or("the response has no end of headers")?);
    let status = head.split(|byte| *byte == b' ').nth(1);
    let status = status.and_then(|status| str::from_utf8(status).ok()?.parse().ok());
    let is_http = head.starts_with(b"HTTP/1.");
    match status.filter(|_| is_http) {
        Some(status) => Ok((status, &body[END_OF_HEAD.len()..])),
        None => Err("its response is not HTTP"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_has_a_status_and_a_body() {
        let response = b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        assert_eq!(parse_response(response), Ok((200, &b"{}"[..])));
        let response = b"HTTP/1.1 503 Service Unavailable\r\n\r\n";
        assert_eq!(parse_response(response), Ok((503, &b""[..])));
        for invalid in [
            &b""[..],
            b"hello",
            b"SSH-2.0 200 OK\r\n\r\n",
            b"HTTP/1.1 ok\r\n\r\n",
        ] {
            assert!(parse_response(invalid).is_err());
        }
    }

    /// Answers one request on a unix socket, as a daemon does, with this body.
    fn answer_once(path: &Path, body: &str) -> std::thread::JoinHandle<()> {
        let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
        let response = format!("HTTP/1.0 200 OK\r\n\r\n{body}");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 64];
            let _ = stream.read(&mut request).unwrap();
            stream.write_all(response.as_bytes()).unwrap();
        })
    }

    /// The snapshot of a daemon that answers with this body.
    fn snapshot_from_answer(body: &str) -> Result<Snapshot, ClientError> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("observe.sock");
        let daemon = answer_once(&socket, body);
        let snapshot = DaemonSocket { socket }.latest_snapshot();
        daemon.join().unwrap();
        snapshot
    }

    #[test]
    fn a_daemon_with_another_format_is_named_with_both_versions() {
        let newer = r#"{"format": 2, "zernel_version": "9.9.9", "observed": 7}"#;
        let error = snapshot_from_answer(newer).unwrap_err().to_string();
        assert!(error.contains("zernel 9.9.9"), "{error}");
        assert!(error.contains(ZERNEL_VERSION), "{error}");
        let older = r#"{"observed": []}"#;
        let error = snapshot_from_answer(older).unwrap_err().to_string();
        assert!(error.contains("older than zernel 0.2.0"), "{error}");
    }

    #[test]
    fn another_version_with_the_same_format_is_understood() {
        let newer = r#"{"format": 1, "zernel_version": "0.3.0", "new": 1, "observed": [{"pid": 7, "new": 2}]}"#;
        let snapshot = snapshot_from_answer(newer).unwrap();
        assert_eq!(snapshot.observed[0].pid, 7);
    }

    #[test]
    fn the_error_without_a_daemon_names_the_command_to_start_one() {
        let folder = tempfile::tempdir().unwrap();
        let socket = DaemonSocket {
            socket: folder.path().join("observe.sock"),
        };
        let error = socket.latest_snapshot().unwrap_err().to_string();
        assert!(error.contains("zernel observe"), "{error}");
    }
}
