//! Sources of batches: a disk, or a server whose clients choose the delay of each response.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::time::ClockId;

use crate::sys::now_ns;

const ADDRESS_FILE_NAME: &str = "storage";
const ANSWER_BYTES: usize = 4096;

/// Runs the storage server of the job in `directory` until this process exits. A client sends a delay in microseconds
/// and gets a response after that time.
pub(crate) fn serve_storage(directory: &Path) -> io::Result<()> {
    let server = TcpListener::bind("127.0.0.1:0")?;
    fs::write(
        directory.join(ADDRESS_FILE_NAME),
        server.local_addr()?.to_string(),
    )?;
    thread::spawn(move || {
        for client in server.incoming().flatten() {
            thread::spawn(move || answer_client(client));
        }
    });
    Ok(())
}

fn answer_client(mut client: TcpStream) -> io::Result<()> {
    let mut asked = [0; 8];
    loop {
        client.read_exact(&mut asked)?;
        thread::sleep(Duration::from_micros(u64::from_le_bytes(asked)));
        client.write_all(&[7; ANSWER_BYTES])?;
    }
}

/// A loader's connection to the storage server.
pub(crate) struct RemoteStorage(TcpStream);

impl RemoteStorage {
    pub(crate) fn connect(directory: &Path) -> io::Result<Self> {
        let address = fs::read_to_string(directory.join(ADDRESS_FILE_NAME))?;
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self(stream))
    }

    pub(crate) fn fetch_with_delay(&mut self, how_long: Duration) -> io::Result<()> {
        self.0
            .write_all(&(how_long.as_micros() as u64).to_le_bytes())?;
        self.0.read_exact(&mut [0; ANSWER_BYTES])
    }
}

const FILE_BYTES: u64 = 8 << 20;
const READ_BYTES: usize = 512 << 10;

#[repr(align(4096))]
struct AlignedBuffer([u8; READ_BYTES]);

/// A loader's file, read without the page cache.
pub(crate) struct UncachedFile {
    file: File,
    buffer: Box<AlignedBuffer>,
    offset: u64,
}

impl UncachedFile {
    pub(crate) fn new(directory: &Path) -> io::Result<Self> {
        let path = directory.join(format!("data-{}", std::process::id()));
        fs::write(&path, vec![7; FILE_BYTES as usize])?;
        File::open(&path)?.sync_all()?;
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path)?;
        Ok(Self {
            file,
            buffer: Box::new(AlignedBuffer([0; READ_BYTES])),
            offset: 0,
        })
    }

    pub(crate) fn read_uncached_for(&mut self, how_long: Duration) -> io::Result<()> {
        let end = now_ns(ClockId::Monotonic) + how_long.as_nanos() as u64;
        while now_ns(ClockId::Monotonic) < end {
            self.file.read_exact_at(&mut self.buffer.0, self.offset)?;
            self.offset = (self.offset + READ_BYTES as u64) % FILE_BYTES;
        }
        Ok(())
    }
}
