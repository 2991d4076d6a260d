//! Access control for requests.
//!
//! A web page can reach loopback addresses through a DNS name that it points at them (DNS rebinding). So every TCP
//! request must name a host of this machine, and an `Origin` header must not name another host. A TCP client may be
//! any user of the machine, so a request sees processes only with the token, unless the daemon exposes everything.
//! Unix sockets need no such checks: browsers cannot reach them, and the kernel reports the client's user.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;

use crate::connection_slots::Slot;
use crate::host::Host;
use crate::peer::{ConnectionOwner, Peer};
use crate::{Expose, Scope, Secret};

/// What a request may see, and which owner its WebSocket is counted for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AccessGrant {
    pub(crate) scope: Scope,
    pub(crate) owner: ConnectionOwner,
}

/// The conditions that a TCP request must meet.
pub(crate) struct AccessPolicy {
    pub(crate) expose: Expose,
    pub(crate) token: Option<Secret>,
    pub(crate) hosts: Vec<Host>,
}

/// The reason why a request is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum RequestRefusal {
    #[error(
        "the request must have exactly one Host header; it must name localhost, a loopback address, the address connected to, \
         or a host that the daemon is configured to allow"
    )]
    UnknownHost,
    #[error("the Origin header names a page on another host")]
    ForeignOrigin,
    #[error("{}", token_needed_text(file.as_deref()))]
    TokenMissing {
        /// The file with the token.
        file: Option<PathBuf>,
    },
}

/// Paths that answer without a token, in the scope [`Scope::Machine`].
const PATHS_WITHOUT_TOKEN: [&str; 1] = ["/healthz"];

/// The answer to a request without the token: where the token is and how to send it.
fn token_needed_text(file: Option<&Path>) -> String {
    let file = file.map_or("FILE".into(), |file| file.display().to_string());
    format!(
        "This request needs the token in {file}: send `Authorization: Bearer TOKEN`, or for a WebSocket `?token=TOKEN`.\n\
         Prometheus sends it with these lines in its scrape_config:\n\n\
         \x20   authorization:\n\
         \x20     credentials_file: {file}\n\n\
         The daemon's unix socket shows your own processes without a token.\n\
         On a machine with a single user, start the daemon with `--expose all`: then no request needs a token."
    )
}

/// Middleware that passes authorized requests on and refuses all others.
pub(crate) async fn enforce_access(
    State(policy): State<Arc<AccessPolicy>>,
    Extension(peer): Extension<Peer>,
    Extension(slot): Extension<Arc<Slot>>,
    mut request: Request,
    next: Next,
) -> Response {
    match policy.authorize_request(&peer, request.uri(), request.headers()) {
        Ok(grant) => {
            slot.assign_to_owner(&grant.owner);
            request.extensions_mut().insert(grant);
            next.run(request).await
        }
        Err(refusal) => refusal.into_response(),
    }
}

impl AccessPolicy {
    fn authorize_request(
        &self,
        peer: &Peer,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<AccessGrant, RequestRefusal> {
        let local = match peer {
            Peer::Tcp { local } => *local,
            Peer::Unix { scope, .. } => {
                let (scope, owner) = (*scope, peer.owner());
                return Ok(AccessGrant { scope, owner });
            }
        };
        let host = self.check_host(local, uri, headers)?;
        check_origin(&host, headers)?;
        if self.has_valid_token(uri, headers) {
            return Ok(AccessGrant {
                scope: Scope::All,
                owner: ConnectionOwner::Trusted,
            });
        }
        let owner = ConnectionOwner::Anonymous;
        let is_open = PATHS_WITHOUT_TOKEN.contains(&uri.path());
        match self.expose {
            Expose::All => Ok(AccessGrant {
                scope: Scope::All,
                owner,
            }),
            Expose::Aggregate => Ok(AccessGrant {
                scope: Scope::Machine,
                owner,
            }),
            Expose::Token if is_open => Ok(AccessGrant {
                scope: Scope::Machine,
                owner,
            }),
            Expose::Token => Err(RequestRefusal::TokenMissing {
                file: self
                    .token
                    .as_ref()
                    .and_then(Secret::token_file_path)
                    .map(Path::to_owned),
            }),
        }
    }

    fn check_host(
        &self,
        local: IpAddr,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Host, RequestRefusal> {
        let is_ours = |host: &Host| {
            host.is_loopback() || *host == Host::Address(local) || self.hosts.contains(host)
        };
        let mut named = headers.get_all(header::HOST).iter();
        let (Some(host), None) = (named.next(), named.next()) else {
            return Err(RequestRefusal::UnknownHost);
        };
        // An absolute request target names a host too, and it takes precedence over the header.
        let also = uri
            .authority()
            .map(|authority| Host::parse(authority.as_str()));
        if also.is_some_and(|host| !host.is_some_and(|host| is_ours(&host))) {
            return Err(RequestRefusal::UnknownHost);
        }
        let host = host.to_str().ok().and_then(Host::parse);
        host.filter(is_ours).ok_or(RequestRefusal::UnknownHost)
    }

    fn has_valid_token(&self, uri: &Uri, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else {
            return false;
        };
        let in_header = headers
            .get(header::AUTHORIZATION)
            .and_then(|value| bearer_token(value.as_bytes()))
            .is_some_and(|offered| token.matches_token(offered));
        // Browsers cannot set headers on a WebSocket, so its token may be in the query. For requests other than
        // WebSockets, a token in the URL would only end up in logs.
        let in_query = || {
            is_websocket_request(headers)
                && token_in_query(uri).is_some_and(|offered| token.matches_token(&offered))
        };
        in_header || in_query()
    }
}

/// Accepts only origins on the requested host or on a loopback address.
fn check_origin(host: &Host, headers: &HeaderMap) -> Result<(), RequestRefusal> {
    for origin in headers.get_all(header::ORIGIN) {
        let origin = origin.to_str().ok().and_then(Host::parse_origin);
        if !origin.is_some_and(|origin| origin.is_loopback() || origin == *host) {
            return Err(RequestRefusal::ForeignOrigin);
        }
    }
    Ok(())
}

fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme
        .eq_ignore_ascii_case(b"Bearer ")
        .then_some(token.trim_ascii())
}

fn is_websocket_request(headers: &HeaderMap) -> bool {
    headers
        .get(header::UPGRADE)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

fn token_in_query(uri: &Uri) -> Option<Vec<u8>> {
    let token = uri
        .query()?
        .split('&')
        .find_map(|pair| pair.strip_prefix("token="))?;
    Some(percent_decode_str(token).collect())
}

impl IntoResponse for RequestRefusal {
    fn into_response(self) -> Response {
        let text = format!("{self}\n");
        match self {
            Self::UnknownHost | Self::ForeignOrigin => {
                (StatusCode::FORBIDDEN, text).into_response()
            }
            Self::TokenMissing { .. } => {
                let challenge = [(header::WWW_AUTHENTICATE, "Bearer realm=\"zernel\"")];
                (StatusCode::UNAUTHORIZED, challenge, text).into_response()
            }
        }
    }
}

#[cfg(test)]
mod tests;
