//! The client of a connection: what it may see, and whose connections it counts among.

use std::io;
use std::net::IpAddr;

use rustix::process::geteuid;
use tokio::net::{TcpStream, UnixStream};

use crate::Scope;

/// The client of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Peer {
    /// A TCP client that connected to the address `local`. Its user is unknown; a token decides the
    /// scope of each request.
    Tcp { local: IpAddr },
    /// A unix socket client, whose user decides the scope.
    Unix { scope: Scope },
}

/// Who a connection is counted for. Each owner has its own share of the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Owner {
    /// Root, the daemon's user, or a client with the token. Others cannot use up this share.
    Trusted,
    /// A user of the unix socket.
    User(u32),
    /// All TCP clients without the token together.
    Anonymous,
}

impl Peer {
    pub(crate) fn of_tcp(stream: &TcpStream) -> io::Result<Self> {
        let local = stream.local_addr()?.ip().to_canonical();
        Ok(Self::Tcp { local })
    }

    /// Identifies the client of a unix socket. This is the only place that decides which processes
    /// such a client sees.
    pub(crate) fn of_unix(stream: &UnixStream) -> io::Result<Self> {
        let user = stream.peer_cred()?.uid();
        let scope = scope_for_user(user, geteuid().as_raw());
        Ok(Self::Unix { scope })
    }

    /// The owner of a connection before its first request.
    pub(crate) fn owner(self) -> Owner {
        match self {
            Self::Tcp { .. } => Owner::Anonymous,
            Self::Unix {
                scope: Scope::User(user),
            } => Owner::User(user),
            Self::Unix {
                scope: Scope::All | Scope::Machine,
            } => Owner::Trusted,
        }
    }
}

/// Returns which processes `user` may see, if the daemon runs as user `own`.
fn scope_for_user(user: u32, own: u32) -> Scope {
    match user == 0 || user == own {
        true => Scope::All,
        false => Scope::User(user),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_daemons_user_see_all_processes() {
        assert_eq!(scope_for_user(0, 0), Scope::All);
        assert_eq!(scope_for_user(0, 7), Scope::All);
        assert_eq!(scope_for_user(7, 7), Scope::All);
        assert_eq!(scope_for_user(8, 7), Scope::User(8));
        assert_eq!(scope_for_user(8, 0), Scope::User(8));
    }

    #[test]
    fn only_root_and_the_daemons_user_are_trusted_by_their_user() {
        let owner = |scope| Peer::Unix { scope }.owner();
        assert_eq!(owner(Scope::All), Owner::Trusted);
        assert_eq!(owner(Scope::User(8)), Owner::User(8));
        let local = [127, 0, 0, 1].into();
        assert_eq!(Peer::Tcp { local }.owner(), Owner::Anonymous);
    }
}
