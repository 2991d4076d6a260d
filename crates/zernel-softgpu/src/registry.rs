//! Tables of objects, by the opaque handles that programs use.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The next handle. Handles look like the addresses that real drivers return but point to no memory, so a wrong handle
/// causes an error and never a crash.
static NEXT_HANDLE: AtomicU64 = AtomicU64::new(0x5067_0000_0000);
const HANDLE_STEP: u64 = 0x100;

/// Returns a new handle, which no object of this process has had.
pub fn new_handle() -> u64 {
    NEXT_HANDLE.fetch_add(HANDLE_STEP, Relaxed)
}

type Objects<T> = Option<HashMap<u64, Arc<T>>>;

/// The living objects of one kind, by handle.
#[derive(Debug)]
pub struct Registry<T>(RwLock<Objects<T>>);

impl<T> Registry<T> {
    /// Creates a registry without objects.
    #[must_use]
    pub const fn new() -> Self {
        Self(RwLock::new(None))
    }

    /// Adds an object and returns a new handle for it.
    pub fn insert(&self, object: Arc<T>) -> u64 {
        let handle = new_handle();
        self.insert_with_handle(handle, object);
        handle
    }

    /// Adds an object with a handle that [`new_handle`] returned.
    pub fn insert_with_handle(&self, handle: u64, object: Arc<T>) {
        self.write().get_or_insert_default().insert(handle, object);
    }

    /// The object with this handle.
    pub fn get(&self, handle: u64) -> Option<Arc<T>> {
        self.read().as_ref()?.get(&handle).cloned()
    }

    /// Removes the object with this handle and returns it.
    pub fn remove(&self, handle: u64) -> Option<Arc<T>> {
        self.write().as_mut()?.remove(&handle)
    }

    /// Removes the objects for which `keep` is false.
    pub fn retain(&self, mut keep: impl FnMut(&T) -> bool) {
        if let Some(objects) = self.write().as_mut() {
            objects.retain(|_, object| keep(object));
        }
    }

    /// An object for which `wanted` is true, and its handle. If there are several, any of them.
    pub fn find(&self, wanted: impl Fn(&T) -> bool) -> Option<(u64, Arc<T>)> {
        let objects = self.read();
        let found = objects.as_ref()?.iter().find(|(_, object)| wanted(object));
        found.map(|(handle, object)| (*handle, Arc::clone(object)))
    }

    /// All objects of the registry.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.read()
            .iter()
            .flat_map(HashMap::values)
            .cloned()
            .collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, Objects<T>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Objects<T>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self::new()
    }
}
