/* Runs packed calls. A plan of one operator on values of one piece runs here; any other is a Python function that gets the
   call unpacked. worker/running.py has the same in Python, and says what this file must do. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define MOST_ARGUMENTS 64

enum { SLOT, SCALAR, CONSTANT, LIST };

typedef struct {
    int kind;
    Py_ssize_t index;  /* SLOT, SCALAR: which; LIST: how many of the parts that follow */
    PyObject *value;   /* CONSTANT */
} Part;

typedef struct {
    PyObject_HEAD
    PyObject *fn, *names; /* the callable, and the names of the last arguments or NULL */
    Py_ssize_t parts_n, arguments_n;
    Part *parts;
} Single;

/* A call that is being run. */
typedef struct {
    long long plan;
    const long long *inputs, *outputs;
    Py_ssize_t inputs_n, outputs_n, scalars_n, scalar;
    PyObject *scalars, *store;
} Running;

/* ------------------------------------------------------------------ Single */

static int single_traverse(Single *self, visitproc visit, void *arg) {
    Py_VISIT(self->fn);
    for (Py_ssize_t i = 0; i < self->parts_n; i++)
        Py_VISIT(self->parts[i].value);
    return 0;
}

static int single_clear(Single *self) {
    Py_CLEAR(self->fn); Py_CLEAR(self->names);
    for (Py_ssize_t i = 0; i < self->parts_n; i++)
        Py_CLEAR(self->parts[i].value);
    return 0;
}

static void single_dealloc(Single *self) {
    PyObject_GC_UnTrack(self);
    single_clear(self);
    PyMem_Free(self->parts);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Single(fn, parts, names): parts are (kind, index, value); names are of the last arguments, or None. */
static PyObject *single_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *fn, *parts, *names;
    if (!PyArg_ParseTuple(args, "OO!O", &fn, &PyTuple_Type, &parts, &names))
        return NULL;
    Single *self = (Single *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->parts = PyMem_Calloc(PyTuple_GET_SIZE(parts) + 1, sizeof *self->parts);
    if (self->parts == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->fn = Py_NewRef(fn);
    self->names = names == Py_None ? NULL : Py_NewRef(names);
    Py_ssize_t inner = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); i++) {
        Part *part = &self->parts[self->parts_n];
        PyObject *value;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parts, i), "inO", &part->kind, &part->index, &value)) {
            Py_DECREF(self);
            return NULL;
        }
        part->value = Py_NewRef(value);
        self->parts_n++;
        if (part->index < 0 || part->kind < SLOT || part->kind > LIST || (inner && part->kind == LIST)) {
            PyErr_SetString(PyExc_ValueError, "a part of a plan that is none");
            Py_DECREF(self);
            return NULL;
        }
        if (inner)
            inner--;
        else {
            self->arguments_n++;
            inner = part->kind == LIST ? part->index : 0;
        }
    }
    if (inner || self->arguments_n > MOST_ARGUMENTS || (self->names && PyTuple_GET_SIZE(self->names) > self->arguments_n)) {
        PyErr_SetString(PyExc_ValueError, "arguments of an operator do not fit");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMemberDef single_members[] = {{"fn", T_OBJECT_EX, offsetof(Single, fn), 0, NULL}, {NULL}};

/* The first piece of an input; a new reference. */
static PyObject *piece(const Running *call, Py_ssize_t slot) {
    if (slot >= call->inputs_n) {
        PyErr_SetString(PyExc_IndexError, "a call has fewer inputs than its plan");
        return NULL;
    }
    PyObject *handle = PyLong_FromLongLong(call->inputs[slot]);
    if (handle == NULL)
        return NULL;
    PyObject *pieces = PyDict_GetItemWithError(call->store, handle), *found = NULL;
    if (pieces == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, handle);
    } else if (PyTuple_CheckExact(pieces) && PyTuple_GET_SIZE(pieces))
        found = Py_NewRef(PyTuple_GET_ITEM(pieces, 0));
    else
        found = PySequence_GetItem(pieces, 0); /* poison cannot be indexed, so this is where it fails */
    Py_DECREF(handle);
    return found;
}

static PyObject *argument(const Running *call, const Part *part) {
    if (part->kind == SLOT)
        return piece(call, part->index);
    if (part->kind == CONSTANT)
        return Py_NewRef(part->value);
    if (part->index >= call->scalars_n) {
        PyErr_SetString(PyExc_IndexError, "a call has fewer numbers than its plan");
        return NULL;
    }
    return Py_NewRef(PyList_GET_ITEM(call->scalars, call->scalar + part->index));
}

static PyObject *list_argument(const Running *call, const Part *parts, Py_ssize_t n) {
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        PyObject *item = argument(call, parts + i);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static int keep(const Running *call, PyObject *result) {
    PyObject *pieces = PyTuple_Pack(1, result), *handle = PyLong_FromLongLong(call->outputs[0]);
    int done = pieces && handle ? PyDict_SetItem(call->store, handle, pieces) : -1;
    Py_XDECREF(pieces);
    Py_XDECREF(handle);
    return done;
}

static int run_single(Single *plan, const Running *call) {
    PyObject *arguments[MOST_ARGUMENTS + 1], **given = arguments + 1, *result = NULL;
    Py_ssize_t n = 0, at = 0, names_n = plan->names ? PyTuple_GET_SIZE(plan->names) : 0;
    if (call->outputs_n != 1) {
        PyErr_SetString(PyExc_IndexError, "a call has not as many outputs as its plan");
        return -1;
    }
    for (; at < plan->parts_n; n++) {
        const Part *part = &plan->parts[at];
        given[n] = part->kind == LIST ? list_argument(call, part + 1, part->index) : argument(call, part);
        if (given[n] == NULL)
            goto done;
        at += part->kind == LIST ? part->index + 1 : 1;
    }
    PyObject *fn = Py_NewRef(plan->fn); /* the first call settles on a faster one */
    result = PyObject_Vectorcall(fn, given, (n - names_n) | PY_VECTORCALL_ARGUMENTS_OFFSET, plan->names);
    Py_DECREF(fn);
done:
    while (n > 0)
        Py_DECREF(given[--n]);
    if (result == NULL)
        return -1;
    int kept = keep(call, result);
    Py_DECREF(result);
    return kept;
}

/* Read a list of handles into the front of a buffer that it moves on. */
static Py_ssize_t read_handles(PyObject *call, const char *name, long long **buffer, const long long *end) {
    PyObject *list = PyObject_GetAttrString(call, name);
    Py_ssize_t n = list && PyList_Check(list) ? PyList_GET_SIZE(list) : -1;
    if (list && (n < 0 || n > end - *buffer)) {
        PyErr_Format(PyExc_ValueError, "%s of a call do not fit", name);
        n = -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if ((*(*buffer)++ = PyLong_AsLongLong(PyList_GET_ITEM(list, i))) == -1 && PyErr_Occurred())
            n = -1;
    Py_XDECREF(list);
    return n;
}

/* single(store, call), for a call that is not packed. */
static PyObject *single_call(Single *self, PyObject *args, PyObject *kwargs) {
    PyObject *store, *given;
    if (!PyArg_ParseTuple(args, "O!O", &PyDict_Type, &store, &given))
        return NULL;
    long long handles[4 * MOST_ARGUMENTS], *next = handles;
    const long long *end = handles + 4 * MOST_ARGUMENTS;
    Running call = {.inputs = handles, .store = store};
    if ((call.inputs_n = read_handles(given, "inputs", &next, end)) < 0)
        return NULL;
    call.outputs = next;
    if ((call.outputs_n = read_handles(given, "outputs", &next, end)) < 0)
        return NULL;
    call.scalars = PyObject_GetAttrString(given, "scalars");
    int failed = call.scalars == NULL || !PyList_Check(call.scalars);
    if (call.scalars != NULL && failed)
        PyErr_SetString(PyExc_TypeError, "scalars of a call are a list");
    if (!failed) {
        call.scalars_n = PyList_GET_SIZE(call.scalars);
        failed = run_single(self, &call) < 0;
    }
    Py_XDECREF(call.scalars);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyTypeObject SingleType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dtorch.worker._fastrun.Single",
    .tp_basicsize = sizeof(Single),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "A plan of one operator, which makes one tensor of values of one piece.",
    .tp_new = single_new,
    .tp_call = (ternaryfunc)single_call,
    .tp_traverse = (traverseproc)single_traverse,
    .tp_clear = (inquiry)single_clear,
    .tp_dealloc = (destructor)single_dealloc,
    .tp_members = single_members,
};

/* ------------------------------------------------------------------ runs of calls */

static PyObject *integers(const long long *from, Py_ssize_t n) {
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list != NULL && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(from[i]);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
    }
    return list;
}

/* Any other plan: a Python function of the store and the call. */
static int run_other(PyObject *plan, const Running *call, PyObject *call_class) {
    PyObject *parts[] = {PyLong_FromLongLong(call->plan), integers(call->inputs, call->inputs_n),
                         integers(call->outputs, call->outputs_n),
                         PyList_GetSlice(call->scalars, call->scalar, call->scalar + call->scalars_n)};
    PyObject *made = NULL, *done = NULL;
    if (parts[0] && parts[1] && parts[2] && parts[3])
        made = PyObject_Vectorcall(call_class, parts, 4, NULL);
    if (made != NULL)
        done = PyObject_CallFunctionObjArgs(plan, call->store, made, NULL);
    for (int i = 0; i < 4; i++)
        Py_XDECREF(parts[i]);
    Py_XDECREF(made);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int run_one(const Running *call, PyObject *plans, PyObject *call_class) {
    PyObject *number = PyLong_FromLongLong(call->plan);
    if (number == NULL)
        return -1;
    PyObject *plan = PyDict_GetItemWithError(plans, number);
    if (plan == NULL && !PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, number);
    Py_DECREF(number);
    if (plan == NULL)
        return -1;
    Py_INCREF(plan);
    int done = Py_IS_TYPE(plan, &SingleType) ? run_single((Single *)plan, call) : run_other(plan, call, call_class);
    Py_DECREF(plan);
    return done;
}

/* Whether the header of a call and what it announces lie within the words and the scalars. */
static int whole(const long long *words, Py_ssize_t left, Py_ssize_t scalars_left) {
    if (left < 4)
        return 0;
    for (int i = 1; i < 4; i++)
        if (words[i] < 0 || words[i] > left + scalars_left)
            return 0;
    return words[1] + words[2] <= left - 4 && words[3] <= scalars_left;
}

/* run_calls(words, scalars, place, plans, store, Call): run from a place on, an array of the numbers of a call, its first word
   and its first scalar. It always tells where the run is: others may look meanwhile, an error leaves it at the call that failed,
   and it ends after the last call. */
static PyObject *run_calls(PyObject *module, PyObject *args) {
    Py_buffer buffer, place;
    PyObject *scalars, *plans, *store, *call_class;
    if (!PyArg_ParseTuple(args, "y*O!w*O!O!O", &buffer, &PyList_Type, &scalars, &place, &PyDict_Type, &plans, &PyDict_Type,
                          &store, &call_class))
        return NULL;
    const long long *words = buffer.buf;
    long long *here = place.buf;
    Py_ssize_t words_n = buffer.len / (Py_ssize_t)sizeof *words;
    int failed = place.len != 3 * (Py_ssize_t)sizeof *here || buffer.len % (Py_ssize_t)sizeof *words;
    failed = failed || here[0] < 0 || here[1] < 0 || here[2] < 0;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "a place is [call, word, scalar], and words have 64 bits");
    while (!failed && here[1] < words_n) {
        const long long *at = words + here[1];
        if (!whole(at, words_n - here[1], PyList_GET_SIZE(scalars) - here[2])) {
            PyErr_SetString(PyExc_ValueError, "a packed call is cut short");
            failed = 1;
            break;
        }
        Running call = {at[0], at + 4, at + 4 + at[1], at[1], at[2], at[3], here[2], scalars, store};
        failed = PyErr_CheckSignals() < 0 || run_one(&call, plans, call_class) < 0;
        if (!failed)
            here[0]++, here[1] += 4 + at[1] + at[2], here[2] += at[3];
    }
    PyBuffer_Release(&place);
    PyBuffer_Release(&buffer);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"run_calls", run_calls, METH_VARARGS, "Run packed calls from a place on."},
    {NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fastrun", "Runs packed calls.", -1, functions};

PyMODINIT_FUNC PyInit__fastrun(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddType(module, &SingleType) < 0)
        return NULL;
    return module;
}
